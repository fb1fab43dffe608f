"""Open files and connections of a rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pretrain.distributed.world import LARGEST_MESH, OWN_DESCRIPTORS, needed_descriptors

# In a process of its own: a hard limit cannot be raised again.
LIMITED = """
import os, resource, sys
from foundation.errors import ConfigError
from pretrain.distributed.world import prepare_descriptors
rank, world_size, soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    prepare_descriptors(rank, world_size)
except ConfigError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.environ.get("TORCH_GLOO_LAZY_INIT", "mesh"))
"""


def limited(*numbers: int) -> list[str]:
    command = [sys.executable, "-c", LIMITED, *map(str, numbers)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize(
    ("numbers", "limit", "connects"),
    [
        ((0, 2, 1024, 4096), 1024, "mesh"),
        ((0, LARGEST_MESH, 256, 4096), OWN_DESCRIPTORS + 2 * LARGEST_MESH, "mesh"),
        ((0, 4096, 1024, 8192), OWN_DESCRIPTORS + 4096, "1"),
        ((7, 4096, 1024, 1024), 1024, "1"),
    ],
)
def test_the_limit_is_raised_as_far_as_the_ranks_need(numbers, limit, connects):
    assert limited(*numbers) == [f"{limit} {connects}"]


def test_a_limit_that_cannot_be_raised_is_named_with_what_raises_it():
    said, after = limited(0, 4096, 1024, 2048)
    assert said == (
        "rank 0 of 4,096 needs 4,608 open files and connections, and its hard limit is 2,048; "
        "raise it (ulimit -Hn, or LimitNOFILE of slurmd)"
    )
    assert after == "1024 1"


def test_only_rank_0_needs_more_with_every_rank_unless_all_are_connected():
    assert needed_descriptors(1, 100_000, is_mesh=False) == needed_descriptors(1, 2, is_mesh=False)
    assert needed_descriptors(0, 2000, is_mesh=False) == OWN_DESCRIPTORS + 2000
    assert needed_descriptors(0, 2000, is_mesh=True) == OWN_DESCRIPTORS + 4000
