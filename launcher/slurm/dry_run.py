"""What a job runs beside its batch script, for `launcher submit --dry-run`: the step of each
attempt, as the supervisor in the job will start it.
"""

from __future__ import annotations

import shlex

from launcher.slurm.job_checks import usable_nodes
from launcher.slurm.sbatch import Job, environment_lines
from launcher.slurm.snapshot import Snapshot
from launcher.slurm.srun import Step, meeting_point, rank_task, srun_command, training_command
from launcher.supervisor import next_attempt_number
from pretrain.config.run import RunConfig
from pretrain.rundir.fence import VARIABLE
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.text import counted


def step_lines(job: Job, config: RunConfig, step_before: int) -> list[str]:
    """Return the step of the job's first attempt as comment lines, to print below the script."""
    count = usable_nodes(config, job.cluster.tasks_per_node, job.nodes.least)
    step = Step(
        nodes=tuple(f"NODE{number}" for number in range(1, count + 1)),
        ranks=count * job.cluster.tasks_per_node,
        cluster=job.cluster,
    )
    number = next_attempt_number(RunDir(job.run_dir))
    task = rank_task(job.code, job.run_dir, number, training_command(job.code, job.run_dir))
    command = srun_command(step, task, [job.run_dir], job.code)
    variables = {**meeting_point(step, job.run_dir, number), VARIABLE: "TOKEN of this attempt"}
    nodes = f"{count} of {job.nodes} nodes" if str(count) != str(job.nodes) else f"{count} nodes"
    start = f"resumes after step {step_before:,}" if step_before else "starts at step 0"
    lines = [
        "",
        f"Before: code, settings and cluster file are copied into {Snapshot(job.run_dir).path}.",
        f"The run {start} of {config.optim.steps:,}.",
        f"In the job, each attempt is one step; here the first, on {nodes}, NODE1 and so on:",
        *_spare_lines(job.nodes.spare),
        "",
        *_folded(command),
        "",
        "Environment of every rank: that of the batch script, and",
        *(f"  {line}" for line in environment_lines(job.cluster)),
        *(f"  export {name}={shlex.quote(value)}" for name, value in variables.items()),
    ]
    return [f"# {line}".rstrip() for line in lines]


def _spare_lines(spare: int) -> list[str]:
    if not spare:
        return []
    replace = "it replaces one that fails" if spare == 1 else "each replaces one that fails"
    return [f"Spare: {counted(spare, 'node')}; {replace}, in the same job."]


def _folded(command: list[str]) -> list[str]:
    """Return the command as a shell reads it, an option per line."""
    first, *others = [shlex.quote(word) for word in command]
    options = 0
    while options < len(others) and others[options].startswith("--"):
        options += 1
    lines = [first, *(f"    {word}" for word in others[:options])]
    lines.append(f"    {' '.join(others[options:])}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
