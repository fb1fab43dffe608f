"""File systems of a few kilobytes, in a mount namespace of their own."""

import functools
import os
import shutil
import subprocess

import pytest


@functools.cache
def can_mount() -> bool:
    """Whether this user may mount file systems in a namespace; containers often forbid it."""
    probe = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(probe, capture_output=True).returncode == 0


# In CI every test runs, and fails where it cannot mount.
needs_mounts = pytest.mark.skipif(
    "CI" not in os.environ and not can_mount(), reason="needs a mount namespace for a small disk"
)
