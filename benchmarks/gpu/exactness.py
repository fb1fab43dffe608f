"""Determinism, DeepSpeed's stages with save and restore, and runs that are killed and resumed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.processes import train_ranks
from benchmarks.gpu.training import Trainer, forget, one_rank, small_run
from foundation.errors import UserError
from foundation.settings import load_config
from pretrain.commands.verify_resume import settings_of_check, train_and_compare
from pretrain.config.choices import AttentionKernel, precision_traits, sums_in_order
from pretrain.config.engine import EngineConfig
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World

# Every ZeRO stage in both half precisions, then what changes where things are or when computed.
CELLS: dict[str, dict[str, object]] = {
    **{f"ZeRO {stage}, bf16": {"zero_stage": stage, "precision": "bf16"} for stage in range(4)},
    **{f"ZeRO {stage}, fp16": {"zero_stage": stage, "precision": "fp16"} for stage in range(4)},
    "ZeRO 2, reduced in bf16": {"zero_stage": 2, "reduction_precision": "bf16"},
    "ZeRO 2, recomputed layers": {"zero_stage": 2, "activation_checkpointing": "full"},
    "ZeRO 1, recomputed scores": {"zero_stage": 1, "activation_checkpointing": "selective"},
    "ZeRO 1, offloaded optimizer": {"zero_stage": 1, "offload_optimizer": True},
    "ZeRO 3, offloaded optimizer": {"zero_stage": 3, "offload_optimizer": True},
    "ZeRO 2, offloaded memories": {
        "zero_stage": 2,
        "offload_memories": True,
        "micro_batch_lanes": 2,
    },
    "ZeRO 3, all of it": {
        "zero_stage": 3,
        "activation_checkpointing": "full",
        "offload_optimizer": True,
        "offload_memories": True,
        "micro_batch_lanes": 2,
    },
}
DRY_CELLS = ("ZeRO 0, fp16", "ZeRO 2, offloaded memories", "ZeRO 3, all of it")

# With a model for each.
KERNELS: tuple[tuple[AttentionKernel, dict[str, Any]], ...] = (
    ("auto", {}),
    ("sdpa", {"positions": "rope", "num_key_heads": 1, "attention_dropout": 0.0}),
    ("atomic", {}),
)


def determinism(context: Context) -> None:
    """Train twice from one seed: every loss and every bit of the state must repeat."""
    count = context.size(20, 3)
    with one_rank() as world:
        for kernel, model in context.size(KERNELS, KERNELS[:2]):
            run = small_run(context, EngineConfig(attention_kernel=kernel), **model)
            first, second = trained_twice(run, context, world, count)
            same = first == second
            words = {"steps": count, "repeats": same, "last_loss": first[0][-1]}
            if sums_in_order(kernel):
                context.report.check(f"two runs, {kernel}", same, **words)
            else:  # sums by atomics need not repeat; how they differ is of interest
                context.report.add(f"two runs, {kernel}", **words)


def trained_twice(
    run: RunConfig, context: Context, world: World, steps: int
) -> list[tuple[list[str], str]]:
    """Return the losses and the hash of the state of two trainings from one seed."""
    found = []
    for _ in range(2):
        trainer = Trainer(run, context.corpus, world, context.work)
        found.append((trainer.steps(steps), trainer.bits()))
        del trainer
        forget(context.device)
    return found


def stages(context: Context) -> None:
    """Train, save beside training, restore into a new engine, and continue: bitwise the same."""
    cells = context.size(CELLS, {name: CELLS[name] for name in DRY_CELLS})
    with one_rank() as world:
        for name, settings in cells.items():
            try:
                differences = resumed_differences(name, settings, context, world)
            except (RuntimeError, UserError, AssertionError) as error:  # the other cells count too
                differences = [f"{type(error).__name__}: {error}"[:300]]
            context.report.check(name, not differences, differences=differences)
            forget(context.device)


def resumed_differences(
    name: str, settings: dict[str, object], context: Context, world: World
) -> list[str]:
    """Return how a restored run differs from one that went on, nothing if it does not."""
    engine = EngineConfig(**settings)  # type: ignore[arg-type]
    if context.is_dry and precision_traits(engine.number_format).scales_loss:
        engine = replace(engine, precision="fp32")  # DeepSpeed has no fp16 on a CPU
    run = small_run(context, engine)
    directory, half = context.work / name.replace(" ", "-"), context.size(4, 2)
    trainer = Trainer(run, context.corpus, world, directory)
    first = trainer.steps(half)
    trainer.save()
    expected, bits = trainer.steps(half), trainer.bits()
    trainer.finish()
    del trainer
    forget(context.device)
    resumed = Trainer(run, context.corpus, world, directory, resumes=True)
    found = resumed.steps(half)
    differences = [] if found == expected else [f"losses {found}, expected {expected}"]
    if resumed.bits() != bits:
        differences.append("weights, moments or memories")
    if not all(torch.isfinite(torch.tensor([float.fromhex(loss) for loss in first + expected]))):
        differences.append(f"losses are not finite: {first + expected}")
    return differences


def resume(context: Context) -> None:
    """Do as `pretrain verify-resume` does: kill a run, resume it, and compare all bytes."""
    experiment = write_experiment(context, context.work / "experiment.yaml")
    steps, kill_at = context.size((12, 7), (3, 2))
    arguments = argparse.Namespace(
        experiment=experiment, overrides=[], ranks=1, steps=steps, kill_at=kill_at,
        resume_ranks=None, resume_zero=None, work_dir=None,
    )  # fmt: skip
    for stage in context.size((1, 2, 3, 0), (1,)):
        arguments.overrides = [f"engine.zero_stage={stage}"]
        train = partial(train_ranks, is_dry=context.is_dry)
        settings = settings_of_check(arguments, load_config(RunConfig, experiment))
        try:
            problems = train_and_compare(arguments, settings, context.work / str(stage), train)
        except UserError as error:
            problems = [str(error)]
        context.report.check(f"ZeRO {stage}", not problems, differences=problems[:5])


def write_experiment(context: Context, path: Path) -> Path:
    """Write an experiment of the default engine on the corpus; returns its path."""
    sizes = context.size((4, 512, 4, 256), (2, 32, 2, 8))
    layers, width, heads, length = sizes
    path.write_text(
        f"model: {{num_layers: {layers}, d_model: {width}, num_heads: {heads}, "
        f"memory_length: {length}, dropout: 0.1, attention_dropout: 0.1}}\n"
        f"data: {{path: {context.corpus}, lanes: 4, segment_length: {length}}}\n"
        "optim: {steps: 100, schedule: {warmup_steps: 5}}\n"
        "evaluation: {lanes: 4}\n"
    )
    return path
