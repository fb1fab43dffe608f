"""Unpacks a job's code and Python environment on a node's own disk. Only the standard library.

    python -I -S stage_node.py check|unpack RUN/slurm/staged.json

Prints the node's name if it has all of it. Eight ranks that import from a shared file system open
its files 28,700 times each; this process opens a few hundred, and one archive.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

MARKER = ".staged.json"  # in a directory that is complete: which archive it is of, and its listing
_FORGOTTEN_SECONDS = 30 * 86400.0  # after which a directory that no start has used is removed
_BLOCK_BYTES = 1 << 20


def local_root(directory: str) -> Path:
    """Where this user's staged directories are below `directory`."""
    return Path(directory) / f"xl-pretrain-staged-{os.geteuid()}"


def listing_of(root: Path) -> str:
    """A hash of names and sizes: programs that clean a node's disk remove single, old files.

    Python adds to its caches while it runs; those do not count.
    """
    lines = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            path = Path(folder, name)
            if path != root / MARKER:
                lines.append(f"{path.relative_to(root)}\t{path.lstat().st_size}\n")
    return hashlib.sha256("".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()


class Hashing:
    """A file that hashes what is read from it, or written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self.digest.update(content)
        return content

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self._file.write(content)


def unpack(archive: Path, sha256: str, target: Path) -> None:
    """Unpack into a new directory `target`; ValueError if the archive is not the one of that hash.

    `target` exists only once all of the archive has been read and compared.
    """
    partial = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with open(archive, "rb") as file:
            hashing: Any = Hashing(file)
            trusted: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
            with tarfile.open(fileobj=hashing, mode="r|", bufsize=_BLOCK_BYTES) as content:
                content.extractall(partial, **trusted)
            while hashing.read(_BLOCK_BYTES):
                pass
        if (found := hashing.digest.hexdigest()) != sha256:
            raise ValueError(f"{archive} has the hash {found[:16]}, expected {sha256[:16]}")
        marker = json.dumps({"sha256": sha256, "listing": listing_of(partial)})
        (partial / MARKER).write_text(marker)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except tarfile.TarError as error:
        raise ValueError(f"{archive} is damaged ({error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_complete(target: Path, sha256: str) -> bool:
    """Whether `target` has been unpacked from that archive and nothing is missing since."""
    try:
        marker = json.loads((target / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return marker == {"sha256": sha256, "listing": listing_of(target)}


def stage(staged: dict[str, Any], may_unpack: bool) -> bool:
    """Whether this node has all directories, after unpacking those that are missing."""
    root = _private(local_root(staged["directory"]))
    for archive in staged["archives"]:
        target, shared = root / archive["name"], Path(archive["path"])
        broadcast = root / shared.name
        with _locked(root / f".{archive['name']}.lock"):
            if is_complete(target, archive["sha256"]):
                os.utime(target / MARKER)
            elif not may_unpack:
                return False
            else:
                _unpack_either(broadcast, shared, archive["sha256"], target)
            if may_unpack:
                broadcast.unlink(missing_ok=True)
    _remove_forgotten(root)
    return True


def _unpack_either(broadcast: Path, shared: Path, sha256: str, target: Path) -> None:
    with contextlib.suppress(ValueError, FileNotFoundError):  # cut short, or never sent
        return unpack(broadcast, sha256, target)
    unpack(shared, sha256, target)


def _private(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = root.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o022:
        raise ValueError(f"{root} is not a directory that only this user can write; remove it")
    return root


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_forgotten(root: Path) -> None:
    for marker in root.glob(f"*/{MARKER}"):
        if time.time() - marker.stat().st_mtime > _FORGOTTEN_SECONDS:
            shutil.rmtree(marker.parent, ignore_errors=True)


def main() -> int:
    mode, description = sys.argv[1:]
    node = os.environ.get("SLURMD_NODENAME", "this node")
    try:
        with open(description) as file:
            staged = json.load(file)
        if stage(staged, may_unpack=mode == "unpack"):
            print(node)
    except (OSError, ValueError) as error:
        print(f"{node}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
