from __future__ import annotations

import pytest

from launcher.slurm.first_node_guard import has_lost_first_node
from launcher.slurm.job_nodes import JobNodes

THREE = JobNodes(("n1", "n2"), ("n3",))


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ("n1", JobNodes(("n3", "n2"))),
        ("n2", JobNodes(("n1", "n3"))),
        ("n3", JobNodes(("n1", "n2"))),
    ],
)
def test_the_first_spare_node_takes_the_place_of_the_lost_one_and_the_others_keep_theirs(
    lost, left
):
    assert THREE.without(lost) == left


def test_without_a_spare_node_there_is_no_choice_left():
    left = THREE.without("n3")
    assert left is not None
    assert left.without("n1") is None
    assert left.without("n3") == left  # it did not train


@pytest.mark.parametrize(
    ("state", "nodes", "expected"),
    [
        ("RUNNING", ["n1", "n3"], False),
        ("RUNNING", ["n3"], True),
        ("COMPLETING", ["n3"], False),
    ],
)
def test_a_job_has_lost_its_first_node_if_it_runs_without_the_one_of_its_script(
    state, nodes, expected
):
    assert has_lost_first_node({"JobState": state, "BatchHost": "n1"}, nodes) is expected
