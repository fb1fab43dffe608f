"""One cluster of four hosts, one experiment and one undisturbed run for all tests here."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.corpora import make_tiny_corpus
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import NEAR, Runs, SlurmRun

TOOLS = ("sbatch", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged", "ip", "nsenter")
TOOLS += ("/usr/sbin/slurmdbd", "/usr/sbin/mariadbd")
MISSING = [tool for tool in TOOLS if not shutil.which(tool)] + ["root"] * (os.geteuid() != 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))
            if MISSING and not os.environ.get("CI"):
                reason = f"no Slurm here: {', '.join(MISSING)} missing"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def lab() -> Iterator[SlurmLab]:
    with SlurmLab() as lab:
        yield lab


@pytest.fixture(scope="session")
def runs(lab: SlurmLab) -> Runs:
    corpus = make_tiny_corpus(lab.path / "corpus")
    return Runs(lab, corpus)


@pytest.fixture(scope="session")
def reference_begun(runs: Runs) -> SlurmRun:
    return runs.submit("reference", **NEAR)


@pytest.fixture(scope="session")
def reference(reference_begun: SlurmRun) -> SlurmRun:
    """The run that nothing happened to."""
    reference_begun.wait_until_finished()
    return reference_begun
