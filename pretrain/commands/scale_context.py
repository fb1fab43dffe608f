"""The actions of `pretrain scale context`: plan, collect and report; see `context`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError, DataError
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.scaling.context import plan_contexts
from pretrain.scaling.context_table import Evaluate, context_rows, read_context
from pretrain.scaling.outputs import refuse_no_directory, refuse_no_file
from pretrain.scaling.planned import check_tokens, sweep_path, write_plan
from pretrain.scaling.sweep_file import read_sweep
from pretrain.scaling.wording import amount
from pretrain.terminal.text import counted, text_table


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    return {"plan": _plan, "collect": _collect, "report": _report}[arguments.step](arguments)


def _plan(arguments: argparse.Namespace) -> int:
    base = load_config(RunConfig, arguments.experiment, arguments.set)
    name = arguments.name or f"{base.name}-context"
    refuse_no_file("--out", sweep_path(arguments, name), f"{name}.yaml")
    runs = plan_contexts(with_vocabulary(base), arguments.segments, arguments.memories)
    unchecked = check_tokens(base, runs)
    heads = ["cell", "segment", "memory", "lanes", "steps", "D", "C"]
    rows = [
        [
            item.name,
            *(str(value) for value in (item.run.data.segment_length, item.run.model.memory_length)),
            *(str(value) for value in (item.run.data.lanes, item.cost.steps)),
            amount(item.cost.tokens),
            f"{item.cost.flops:.3e}",
        ]
        for item in runs
    ]
    print(text_table([heads, *rows]))
    total = f"{counted(len(runs), 'run')} of {amount(runs[0].cost.parameters)} parameters, "
    total += f"{sum(item.cost.flops for item in runs):.3g} FLOPs"
    print("\n".join([f"total: {total}", *unchecked]))
    write_plan(arguments, name, base, runs, [total])
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from pretrain.scaling.collect import write_rows

    sweep = read_sweep(arguments.sweep)
    if not arguments.runs_dir.is_dir():
        raise DataError(
            f"{arguments.runs_dir} is no directory; name the one that holds the sweep's run directories"
        )
    if arguments.max_tokens < 0:
        raise ConfigError(f"--max-tokens {arguments.max_tokens} must be 0 or more")
    refuse_no_file("--out", arguments.out, "context.csv")
    rows = context_rows(sweep, arguments.runs_dir, _evaluator(arguments.max_tokens))
    write_rows(arguments.out, rows)
    left_out = [row for row in rows if row.excluded]
    print(
        f"{arguments.out}: {len(sweep.cells) - len(left_out)} of {len(sweep.cells)} cells evaluated"
    )
    for row in left_out:
        print(f"left out: {row.name}: {row.excluded}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from pretrain.scaling.context_report import write_context_report

    refuse_no_directory("--out", arguments.out)
    print(
        f"report: {write_context_report(read_context(arguments.table), arguments.out, arguments.title)}"
    )
    return 0


def _evaluator(max_tokens: int) -> Evaluate:
    """Loss on the validation split, read in the run's own segments; imports torch when the first run is evaluated."""

    def losses(directory: Path, memory_lengths: Sequence[int]) -> list[float]:
        from data_pipeline.corpora.corpus import Corpus
        from pretrain.distributed.world import destroy_process_group, init_world
        from pretrain.evaluation.evaluate import TrainedScorer, evaluate
        from pretrain.weights.trained_model import load_trained

        world = init_world()
        try:
            trained = load_trained(directory, world.device)
            config, corpus = (
                trained.config,
                Corpus.open(trained.config.data.directory() / "validation"),
            )
            found = [
                evaluate(
                    TrainedScorer(trained, world),
                    corpus,
                    memory_length=length,
                    segment_length=trained.segment_length,
                    num_lanes=config.evaluation.lanes,
                    max_tokens=max_tokens or config.evaluation.max_tokens,
                ).loss
                for length in memory_lengths
            ]
        finally:
            destroy_process_group()
        print(
            f"{directory.name}: "
            + "  ".join(f"{n}: {x:.4f}" for n, x in zip(memory_lengths, found, strict=True))
        )
        return found

    return losses
