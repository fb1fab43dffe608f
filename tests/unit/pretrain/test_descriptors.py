"""Open files and connections of a rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pretrain.distributed.world import LARGEST_MESH

# In a process of its own: a hard limit cannot be raised again.
LIMITED = """
import os, resource, sys
from pretrain.distributed.world import prepare_descriptors
world_size, soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
prepare_descriptors(world_size)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.environ.get("TORCH_GLOO_LAZY_INIT", "mesh"))
"""


@pytest.mark.parametrize(
    ("world_size", "soft", "hard", "expected"),
    [
        (2, 1024, 4096, "4096 mesh"),
        (LARGEST_MESH, 1024, 1024, "1024 mesh"),
        (LARGEST_MESH + 1, 1024, 8192, "8192 1"),
    ],
)
def test_a_rank_may_open_what_its_hard_limit_allows(world_size, soft, hard, expected):
    command = [sys.executable, "-c", LIMITED, *map(str, (world_size, soft, hard))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == expected
