"""A snapshot of code and settings in the run directory, so that later edits do not change a job
that waits.

RUN/slurm/{job.sbatch, experiment.yaml, cluster.yaml, code/, code.commit, code.diff}
"""

from __future__ import annotations

import compileall
import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from foundation.errors import ConfigError
from foundation.files import write_text
from foundation.own_programs import make_startable
from foundation.settings import to_tree
from foundation.yaml_files import dump_yaml
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import ClusterConfig
from pretrain.rundir.run_dir import RunDir, make_run_directory, refuse_foreign_run, refuse_links

_SOURCE = Path(__file__).resolve().parents[2]
_PACKAGES = ("foundation", "data_pipeline", "launcher", "pretrain")


class Snapshot:
    """Paths under RUN/slurm. The constructor touches nothing."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "slurm"
        self.script = self.path / "job.sbatch"
        self.experiment = self.path / "experiment.yaml"
        self.cluster = self.path / "cluster.yaml"
        self.code = self.path / "code"

    def take(self, config: RunConfig, cluster: ClusterConfig, script: str) -> None:
        """Save the settings, this project's code with its git state, and the script.

        Replaces an older snapshot.
        """
        self.take_settings(config, cluster)
        self.take_code(script)

    def take_settings(self, config: RunConfig, cluster: ClusterConfig) -> None:
        """Save experiment and cluster settings: all that differs between the cells of a sweep."""
        self._make()
        _write(self.experiment, dump_yaml(to_tree(config)))
        _write(self.cluster, dump_yaml(to_tree(cluster)))

    def take_code(self, script: str) -> None:
        """Save this project's code with its git state, and the script that runs it."""
        self._make()
        shutil.rmtree(self.code, ignore_errors=True)
        for package in _PACKAGES:
            shutil.copytree(_SOURCE / package, self.code / package)
        make_startable(self.code)
        # Python keeps the half of a file of bytecode that a full disk took: let a job write none.
        compileall.compile_dir(self.code, quiet=2)
        for path in (self.code, *self.code.rglob("*")):  # the source may be writable by a group
            path.chmod(path.stat().st_mode & 0o700)
        for name, command in {
            "code.commit": ["rev-parse", "HEAD"],
            "code.diff": ["diff", "HEAD"],
        }.items():
            _write(self.path / name, _git(*command))
        _write(self.script, script)

    def _make(self) -> None:
        """Only its user may read settings and environment of a run, or change what a job runs."""
        make_run_directory(self.path.parent)
        self.path.mkdir(exist_ok=True, mode=0o700)
        self.path.chmod(0o700)


@contextlib.contextmanager
def replaced_snapshot(run_dir: RunDir) -> Iterator[Snapshot]:
    """The snapshot to take in the block. If Slurm refuses the job, all is as it was before.

    Raises ConfigError if others can write the run directory: they could exchange what the job
    executes.

    After any other failure the new snapshot stays: the job may exist, although its id was lost.
    """
    snapshot, before = Snapshot(run_dir.path), run_dir.path / ".slurm.tmp"
    made = [path for path in (run_dir.path, run_dir.logs) if not path.exists()]
    refuse_links(run_dir.path)
    make_run_directory(run_dir.path)
    refuse_foreign_run(run_dir.path)
    run_dir.logs.mkdir(exist_ok=True)
    shutil.rmtree(before, ignore_errors=True)
    if snapshot.path.exists():
        snapshot.path.rename(before)
    try:
        yield snapshot
    except ConfigError:
        shutil.rmtree(snapshot.path, ignore_errors=True)
        if before.exists():
            before.rename(snapshot.path)
        for path in reversed(made):
            with contextlib.suppress(OSError):  # something else is in there
                path.rmdir()
        raise
    shutil.rmtree(before, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    write_text(path, text, mode=0o600)


def _git(*command: str) -> str:
    """The output of git for the source.

    Empty if it is not a work tree, as after an installation.
    """
    try:
        result = subprocess.run(
            ["git", "-C", str(_SOURCE), *command], capture_output=True, text=True
        )
    except FileNotFoundError:
        return ""
    return result.stdout if result.returncode == 0 else ""
