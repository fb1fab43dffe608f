"""`pretrain scale context plan`, `collect` and `report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.csv_files import check_table_path
from data_pipeline.errors import ConfigError
from data_pipeline.program import Program, add_experiment
from data_pipeline.sizes import size_of
from pretrain.commands.output_paths import check_output_directory, check_output_file
from pretrain.commands.scale import (
    add_report_output,
    add_sweep_input,
    add_sweep_output,
    sweep_base,
    swept_runs,
)
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.scaling.context import (
    ContextRow,
    Evaluate,
    cost_line,
    evaluated_rows,
    plan_contexts,
    plan_evaluations,
    read_context,
)
from pretrain.scaling.intervals import amount
from pretrain.scaling.plan import check_corpus, write_plan
from pretrain.scaling.recipe import replaced_settings
from pretrain.terminal.text import counted, fitted_table, flops_text

PROGRAM = Program(
    "pretrain scale context",
    "Loss against segment and memory length.",
    {
        "plan": (
            "pretrain.commands.scale_context:plan",
            "write a sweep of every segment with every memory, at equal tokens and at equal FLOPs",
        ),
        "collect": (
            "pretrain.commands.scale_context:collect",
            "evaluate every run of the sweep with memories of 0 to 8 times its own",
        ),
        "report": (
            "pretrain.commands.scale_context:report",
            "write the losses as one HTML page and PNGs",
        ),
        "optimum": (
            "pretrain.commands.scale_memory",
            "fit the loss over size, tokens and memory length, and name the memory that pays",
        ),
    },
)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale context plan`."""
    add = parser.add_argument
    base = "base experiment; it sets the model, tokens and FLOPs that all runs have"
    add_experiment(parser, RunConfig, base)
    for name, letter in (("segment", "T"), ("memory", "M")):
        plural = name.replace("y", "ie") + "s"
        words = f"{name} lengths, in tokens"
        add(
            f"--{plural}",
            type=size_of("tokens"),
            nargs="+",
            required=True,
            metavar=letter,
            help=words,
        )
    add_sweep_output(parser)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan and write the sweep file."""
    base, name = sweep_base(arguments, "context")
    runs = plan_contexts(with_vocabulary(base), arguments.segments, arguments.memories)
    unchecked = check_corpus(
        base,
        runs,
        fewer_tokens="use an experiment of fewer steps, or more text",
        fewer_lanes="longer --segments, which need fewer lanes",
    )
    heads = ["cell", "segment", "memory", "lanes", "steps", "D", "C"]
    rows = [
        [
            item.name,
            *map(str, (item.run.data.segment_length, item.run.model.longest_memory)),
            *map(str, (item.run.data.lanes, item.cost.steps)),
            amount(item.cost.tokens),
            flops_text(item.cost.flops),
        ]
        for item in runs
    ]
    print(fitted_table([heads, *rows]))
    total = f"{counted(len(runs), 'run')} of {amount(runs[0].cost.parameters)} parameters, "
    total += f"{sum(item.cost.flops for item in runs):.3g} FLOPs"
    print("\n".join([f"total: {total}", replaced_settings(base), *unchecked]))
    write_plan(arguments, name, base, runs, [total])
    return 0


def add_collect_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale context collect`."""
    add_sweep_input(parser, None, shown="context.csv in --runs-dir")
    words = "tokens to score per run (default: as its evaluations do)"
    add = parser.add_argument
    add("--max-tokens", type=size_of("tokens"), default=0, metavar="N", help=words)
    own = "measure with the memory of training alone, which is all that 'context optimum' reads"
    add("--own-memory", action="store_true", help=own)


def run_collect(arguments: argparse.Namespace) -> int:
    """Evaluate the runs and write the table."""
    from pretrain.scaling.collect import write_rows

    sweep, runs, placed = swept_runs(arguments, "pretrain scale context collect")
    if arguments.max_tokens < 0:
        raise ConfigError(f"--max-tokens {arguments.max_tokens} must be 0 or more")
    output = arguments.output or runs / "context.csv"
    check_output_file("--output", output, "context.csv")
    plans = plan_evaluations(placed, output, arguments.max_tokens, arguments.own_memory)
    check_table_path(output, [cell.name for cell in sweep.cells])
    print(cost_line(plans), flush=True)
    rows: list[ContextRow] = []
    for found in evaluated_rows(plans, _evaluator(arguments.max_tokens)):
        rows += found
        write_rows(output, rows)  # so that a collection that is stopped need not repeat it
    left_out = [row for row in rows if row.excluded]
    cells = len(sweep.cells)
    print(f"{output}: {cells - len(left_out)} of {cells} cells evaluated")
    for row in left_out:
        print(f"left out: {row.name}: {row.excluded}")
    if len(left_out) < cells:
        print(f"next: pretrain scale context report {output}")
    return 0


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale context report`."""
    parser.add_argument("table", type=Path, metavar="TABLE", help="table that collect wrote")
    add_report_output(parser, None, "Context lengths", shown="context-report beside TABLE")


def run_report(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from pretrain.scaling.context_report import context_tables, write_context_report

    output = arguments.output or arguments.table.parent / "context-report"
    check_output_directory("--output", output)
    rows = read_context(arguments.table)
    path = write_context_report(rows, arguments.table, output, arguments.title)
    for title, table in context_tables(rows).items():
        print(f"{title}\n\n{fitted_table(table)}\n")
    print(f"report: {path}")
    return 0


def _evaluator(max_tokens: int) -> Evaluate:
    """Return a function that measures validation losses in the run's own segments."""

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
                Corpus.open(trained.corpus_directory() / "validation"),
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
