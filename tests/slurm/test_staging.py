"""Ranks that import from their nodes' own disks. Each host of the lab has one, at /mnt."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from pretrain.rundir.training_events import TrainingBegan
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import NEAR, NODES, RANKS_PER_NODE, Runs, SlurmRun

ROOT = Path("/mnt/xl-pretrain-staged-0")


def small_environment(path: Path) -> Path:
    """The Python of an environment that finds all packages where they are anyway."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    (packages,) = path.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return path / "bin" / "python"


def programs(run: SlurmRun) -> set[tuple[Path, Path]]:
    """Python and code of each rank, as its process was started."""
    ranks = range(NODES * RANKS_PER_NODE)
    lines = [Path(f"/proc/{run.process_of(rank)}/cmdline").read_bytes() for rank in ranks]
    return {tuple(Path(word) for word in line.decode().split("\0")[:2]) for line in lines}


def test_ranks_import_from_their_nodes_disks_and_a_later_start_finds_the_copies_there(
    runs: Runs, lab: SlurmLab, tmp_path: Path
):
    python = small_environment(lab.path / "environment")
    flags = ("--stage-environment", "--stage-directory=/mnt", "optim.steps=100000")
    _, *arguments = runs.command("staged", *flags, **NEAR)
    result = lab.run(str(python), *arguments)
    assert result.returncode == 0, result.stderr
    run = runs.submitted("staged", result)
    run.wait_for_step(1)
    ((program, code),) = programs(run)
    assert (program.parents[2], code.parent) == (ROOT, ROOT)
    assert program.parents[1].name.startswith("environment-")
    for rank in (0, RANKS_PER_NODE):  # one of each node
        disk = Path(f"/proc/{run.process_of(rank)}/root")
        assert sorted(path.name for path in (disk / ROOT.relative_to("/")).glob("[!.]*")) == [
            code.name,
            program.parents[1].name,
        ]
    assert "copied to the nodes' disks" in run.log()
    assert "sbcast failed" not in run.log()
    assert lab.run("scontrol", "requeue", run.job).returncode == 0
    run.until(lambda: len(run.events(TrainingBegan)) == 2)
    assert run.log().count("copied to the nodes' disks") == 1
    assert "found on the nodes' disks" in run.log()
    assert programs(run) == {(program, code)}
    lab.run("scancel", run.job)
