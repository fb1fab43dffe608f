"""File systems of a few kilobytes, in a mount namespace of their own."""

from __future__ import annotations

import functools
import shutil
import subprocess


@functools.cache
def can_mount() -> bool:
    """Whether this user may mount file systems in a namespace; containers often forbid it."""
    probe = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(probe, capture_output=True, check=False).returncode == 0
    )
