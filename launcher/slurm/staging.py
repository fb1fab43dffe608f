"""Code and Python environment on the nodes' own disks: packed once where a run is submitted, sent
to the nodes at each start of its job, and reused there.

RUN/slurm/staged.json             what the job stages     RUN/../.staged/environment-HASH.tar
DIR/xl-pretrain-staged-UID/       on each node            RUN/../.staged/code-HASH.tar
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from data_pipeline.errors import ConfigError
from data_pipeline.files import atomic_write, read_json, sha256_of, write_json
from data_pipeline.ownership import private_directory
from data_pipeline.typed_json import from_json
from launcher.slurm import stage_node
from launcher.slurm.snapshot import Snapshot
from launcher.slurm.srun import Step, run_on_each_node
from pretrain.costs.cluster import ClusterConfig

DEFAULT_DIRECTORY = Path("/tmp")
_OF_SYSTEM = (Path("/usr"), Path("/usr/local"), Path("/"))
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A directory in one file. `name` is that of its copy on a node."""

    name: str
    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What the nodes unpack below `directory`; the program of the ranks is in there."""

    directory: str
    archives: tuple[Archive, ...]
    python: str  # of the ranks
    code: str


def check_staging(cluster: ClusterConfig, directory: Path) -> None:
    """Raise ConfigError if there is no environment to pack, or nodes have no such directory."""
    if not directory.is_absolute():
        raise ConfigError(
            f"--stage-directory={directory} is a relative path, expected a directory of every "
            f"node; use one such as {DEFAULT_DIRECTORY}"
        )
    if cluster.container_image:
        raise ConfigError(
            "--stage-environment packs the Python environment of this host, but the ranks run in "
            f"container_image={cluster.container_image}; leave the flag out"
        )
    if Path(sys.prefix) in _OF_SYSTEM:
        raise ConfigError(
            f"--stage-environment packs a Python environment, but {sys.executable} is the "
            "system's; install the project into a virtual environment"
        )


def pack(run_dir: Path, directory: Path) -> Staged:
    """Pack the snapshot's code and this Python environment, unless that was done before, and write
    down what the job has to stage."""
    archives = private_directory(run_dir.parent / ".staged")
    snapshot = Snapshot(run_dir)
    code = _packed(snapshot.code, "code", archives, by_content=True)
    environment = _packed(Path(sys.prefix), "environment", archives, by_content=False)
    root = stage_node.local_root(str(directory))
    python = Path(sys.executable).relative_to(sys.prefix)
    staged = Staged(
        directory=str(directory),
        archives=(code, environment),
        python=str(root / environment.name / python),
        code=str(root / code.name),
    )
    write_json(snapshot.staged, asdict(staged))
    return staged


def with_staged_program(step: Step, run_dir: Path) -> Step:
    """The step with the program on the nodes' disks, if the job has one and all nodes do.

    Otherwise a warning says why, and ranks start from the shared disk.
    """
    description = Snapshot(run_dir).staged
    if not description.exists():
        return step
    start = time.monotonic()
    staged = from_json(Staged, read_json(description))
    missing = was_missing = _lacking(step, "check", description)[0]
    if missing:
        _broadcast(staged)
        missing, problem = _lacking(step, "unpack", description)
        if missing:
            _log.warning(
                "ranks start from the shared disk: staging failed on %s: %s",
                ", ".join(missing), problem or "no answer",
            )  # fmt: skip
            return step
    seconds, how = time.monotonic() - start, "copied to" if was_missing else "found on"
    _log.info("code and environment: %s the nodes' disks in %.1f s", how, seconds)
    return replace(step, python=staged.python, code=Path(staged.code))


def _lacking(step: Step, mode: str, description: Path) -> tuple[list[str], str]:
    """The nodes that do not have all of it, and the first error."""
    program = [sys.executable, "-I", "-S", str(Path(stage_node.__file__).absolute())]
    result = run_on_each_node(step, ["--chdir=/"], [*program, mode, str(description)])
    ready = result.stdout.split()
    errors = [line for line in result.stderr.splitlines() if not line.startswith("srun:")]
    return [node for node in step.nodes if node not in ready], next(iter(errors), "")


def _broadcast(staged: Staged) -> None:
    """Send the archives over Slurm's tree of nodes; where it cannot, nodes read the shared ones."""
    root = stage_node.local_root(staged.directory)
    for archive in staged.archives:
        path = Path(archive.path)
        command = ["sbcast", "--force", str(path), str(root / path.name)]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            return
        if result.returncode:
            reason = " ".join(result.stderr.split())
            _log.warning("nodes read %s themselves: sbcast failed: %s", path, reason)


def _packed(directory: Path, name: str, archives: Path, by_content: bool) -> Archive:
    """The archive of a directory, made unless one of the same contents is there."""
    name = f"{name}-{_key_of(directory, by_content)}"
    path, sha256_file = archives / f"{name}.tar", archives / f"{name}.sha256"
    if not (path.exists() and sha256_file.exists()):
        _log.info("packing %s into %s", directory, path)
        with atomic_write(path, mode=0o600) as file:
            digest = _write_tar(directory, file)
        write_json(sha256_file, digest)
    return Archive(name=name, path=str(path), sha256=str(read_json(sha256_file)))


def _write_tar(directory: Path, file: IO[bytes]) -> str:
    """Write the directory's contents, with the bytecode beside its modules; returns the hash."""
    hashing: Any = stage_node.Hashing(file)
    with tarfile.open(fileobj=hashing, mode="w|") as tar:
        for entry in sorted(directory.iterdir()):
            tar.add(entry, entry.name)
    return hashing.digest.hexdigest()


def _key_of(directory: Path, by_content: bool) -> str:
    """A hash of a directory: of names with contents, or of names, sizes and times, which is enough
    for an installation and takes no minute."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(directory):
        names.sort()
        names[:] = [each for each in names if each != "__pycache__"]
        for path in (Path(folder, each) for each in sorted(files)):
            status = path.lstat()
            what = f"{status.st_size} {status.st_mtime_ns}"
            if path.is_symlink():
                what = os.readlink(path)
            elif by_content:
                what = sha256_of(path)
            line = f"{path.relative_to(directory)}\t{status.st_mode:o}\t{what}\n"
            digest.update(os.fsencode(line))
    return digest.hexdigest()[:16]
