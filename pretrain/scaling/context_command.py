"""The actions of `pretrain scale context`: plan, collect and report; see `context`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError, DataError
from pretrain.config import RunConfig
from pretrain.scaling.context import context_sweep, plan_contexts
from pretrain.scaling.context_table import Evaluate, context_rows, read_context
from pretrain.scaling.plan import as_written, corpus_tokens, refuse_more_tokens, with_vocabulary
from pretrain.scaling.summary import aligned, number
from pretrain.scaling.sweep_file import read_sweep, write_sweep


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    return {"plan": _plan, "collect": _collect, "report": _report}[arguments.step](arguments)


def _plan(arguments: argparse.Namespace) -> int:
    base = load_config(RunConfig, arguments.experiment, arguments.set)
    runs = plan_contexts(with_vocabulary(base), arguments.segments, arguments.memories)
    available = corpus_tokens(base)
    if available is not None:
        refuse_more_tokens({item.name: item.cost.tokens for item in runs}, available)
    heads = ["cell", "segment", "memory", "lanes", "steps", "D", "C"]
    rows = [
        [
            item.name,
            *(str(value) for value in (item.run.data.segment_length, item.run.model.memory_length)),
            *(str(value) for value in (item.run.data.lanes, item.cost.steps)),
            number(item.cost.tokens, prefix=True),
            f"{item.cost.flops:.3e}",
        ]
        for item in runs
    ]
    print("\n".join(aligned(heads, rows)))
    total = f"{len(runs)} runs of {number(runs[0].cost.parameters, prefix=True)} parameters, "
    total += f"{sum(item.cost.flops for item in runs):.3g} FLOPs"
    print(f"total: {total}")
    name = arguments.name or f"{base.name}-context"
    path = arguments.out or Path("configs/sweeps") / f"{name}.yaml"
    plain = load_config(RunConfig, arguments.experiment)
    written = [replace(item, run=as_written(item.run, base)) for item in runs]
    write_sweep(path, context_sweep(name, arguments.experiment, plain, written, path.parent, [total]))
    print(f"sweep: {path} ({len(runs)} cells)")
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from pretrain.scaling.collect import write_rows

    sweep = read_sweep(arguments.sweep)
    if not arguments.runs_dir.is_dir():
        raise DataError(f"{arguments.runs_dir} is no directory; name the one that holds the sweep's run directories")
    if arguments.max_tokens < 0:
        raise ConfigError(f"--max-tokens {arguments.max_tokens} must be 0 or more")
    rows = context_rows(sweep, arguments.runs_dir, _evaluator(arguments.max_tokens))
    write_rows(arguments.out, rows)
    left_out = [row for row in rows if row.excluded]
    print(f"{arguments.out}: {len(sweep.cells) - len(left_out)} of {len(sweep.cells)} cells evaluated")
    for row in left_out:
        print(f"left out: {row.name}: {row.excluded}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from pretrain.scaling.context_report import write_context_report

    print(f"report: {write_context_report(read_context(arguments.table), arguments.out, arguments.title)}")
    return 0


def _evaluator(max_tokens: int) -> Evaluate:
    """Loss on the validation split, read in the run's own segments; imports torch when the first run is evaluated."""

    def losses(directory: Path, memory_lengths: Sequence[int]) -> list[float]:
        from data_pipeline.corpus import Corpus
        from pretrain.distributed import init_world, leave_world
        from pretrain.evaluate import TrainedScorer, evaluate
        from pretrain.inference import load_trained

        world = init_world()
        try:
            trained = load_trained(directory, world.device)
            config, corpus = trained.config, Corpus.open(trained.config.data.directory() / "validation")
            found = [
                evaluate(
                    TrainedScorer(trained, world),
                    corpus,
                    memory_length=length,
                    segment_length=config.data.segment_length,
                    num_lanes=config.evaluation.lanes,
                    max_tokens=max_tokens or config.evaluation.max_tokens,
                ).loss
                for length in memory_lengths
            ]
        finally:
            leave_world()
        print(f"{directory.name}: " + "  ".join(f"{n}: {x:.4f}" for n, x in zip(memory_lengths, found, strict=True)))
        return found

    return losses
