"""`pretrain scale predict`: the optimum for a budget, a size or a number of tokens."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from data_pipeline.config_loader import load_config, to_tree
from data_pipeline.errors import ConfigError
from data_pipeline.files import refuse_overwrite, write_text
from data_pipeline.sizes import amount_of
from data_pipeline.yaml_files import dump_yaml
from pretrain.commands.output_paths import check_output_file
from pretrain.commands.scale import (
    add_family,
    add_runs,
    family_of,
    rule_name,
    rule_of,
)
from pretrain.commands.scale_fit import fit_of
from pretrain.commands.scale_questions import add_questions, answers, asked, run_lines
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.fit import Fit
from pretrain.scaling.intervals import LEVEL, amount, as_loss, as_size, shown
from pretrain.scaling.predict import (
    BAND,
    Forecast,
    doubts,
    forecast,
    law_of_runs,
    loss_of_run,
    near_optimal_band,
    preferred,
    refuse_unknown,
    refuse_wild,
    run_doubts,
)
from pretrain.scaling.recipe import with_budget
from pretrain.scaling.summary import choice_line, warning_lines
from pretrain.terminal.text import counted, fitted_table, flops_text

UNANSWERED_WARNING = 0.01  # fraction of lines without an answer from which there is a warning
ASKED = {
    "flops": "at C = {} FLOPs",
    "tokens": "that reads D = {} tokens",
    "parameters": "of N = {} parameters",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale predict`."""
    add_runs(parser)
    add = parser.add_argument
    for name, letter, words in (
        ("flops", "C", "training FLOPs"),
        ("tokens", "D", "tokens"),
        ("params", "N", "parameters"),
    ):
        help_text = f"predict the optimum of this many {words}"
        add(f"--{name}", type=amount_of(words), default=0.0, metavar=letter, help=help_text)
    law = "law whose optimum is written: parametric, tied, isoflop or lowest"
    add("--law", default="", help=law)
    base = "base experiment, whose family of shapes is chosen from"
    add("--experiment", type=Path, metavar="FILE", help=base)
    written = "write the nearest legal run here, as an experiment file"
    add("--write", type=Path, metavar="FILE", help=written)
    add_questions(parser)
    add_family(parser)
    force = "predict even far from the fitted runs"
    add("--force", action="store_true", help=force)


def run(arguments: argparse.Namespace) -> int:
    """Print the forecasts and, with --write, write the experiment file."""
    given = _question(arguments)
    base = (
        with_vocabulary(load_config(RunConfig, arguments.experiment))
        if arguments.experiment
        else None
    )
    fit = fit_of(arguments)
    if len(given) == 2:
        return _single_run(fit, arguments)
    approach = preferred(fit, arguments.law)
    chosen = forecast(approach, fit.flops_law, **given)
    reasons = doubts(fit, chosen.flops.value, approach)
    if not arguments.force:
        refuse_wild(reasons)
    found = answers(fit, chosen.flops.value, arguments)
    ((asked, value),) = given.items()
    where = ASKED[asked].format(amount(value) if asked != "flops" else f"{value:.3g}")
    print("\n".join(warning_lines(fit)), end="\n" if fit.warnings else "")
    print(f"by {arguments.law}, as asked" if arguments.law else choice_line(fit))
    print(f"the compute-optimal run {where}, by each law; {LEVEL}% intervals")
    forecasts = [forecast(item, fit.flops_law, **given) for item in fit.approaches]
    print(fitted_table(_table(forecasts, asked)))
    lines = [f"doubt: {doubt}" for doubt in reasons]
    if approach.no_interval:
        lines.append(f"{approach.title} without an interval: {approach.no_interval}")
    if chosen.unanswered >= UNANSWERED_WARNING:
        lines.append(
            f"warning: {chosen.unanswered:.0%} of the resamples of {chosen.approach} have no such "
            "run; its intervals are too narrow"
        )
    if band := near_optimal_band(fit, chosen.flops.value, approach):
        low, high = (as_size(size) for size in band)
        lines.append(
            f"near-optimal at {chosen.flops.value:.3g} FLOPs: N from {low} to {high} loses at most "
            f"{BAND:.0%} by {approach.title}"
        )
    for answer in found:
        lines += answer.lines
        chosen = answer.forecast
    print("\n".join(lines))
    if base:
        _nearest(base, chosen, arguments)
    return 0


def _table(forecasts: Sequence[Forecast], asked: str) -> list[list[str]]:
    """Heads and a row per law, without the column that was `asked` for."""
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "parameters": ("N*", as_size),
        "tokens": ("D*", as_size),
        "flops": ("C", flops_text),
        "loss": ("loss", as_loss),
    }
    del columns[asked]
    rows = [
        [item.approach, *(shown(getattr(item, name), text) for name, (_, text) in columns.items())]
        for item in forecasts
    ]
    return [["law", *(head for head, _ in columns.values())], *rows]


def _question(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the question: flops, tokens or parameters, or the last two."""
    target = {"flops": arguments.flops, "tokens": arguments.tokens, "parameters": arguments.params}
    given = {name: value for name, value in target.items() if value}
    is_wrong = any(not 0 <= value < math.inf for value in target.values())
    if is_wrong or not given or ("flops" in given and len(given) > 1):
        raise ConfigError(
            "give a positive --flops, --tokens or --params; --tokens and --params together ask "
            "for one run's loss"
        )
    refuse_unknown(arguments.law)
    if arguments.write and not arguments.experiment:
        raise ConfigError(
            "--write needs --experiment, the experiment whose family of shapes to choose from"
        )
    if arguments.write:
        check_output_file("--write", arguments.write, "best.yaml")
        refuse_overwrite(arguments.write)
    asked(arguments)
    idle = [name for name in ("law", "experiment") if getattr(arguments, name)]
    if len(given) == 2 and idle:
        raise ConfigError(
            f"--{idle[0]} has no effect with both --tokens and --params, which ask for one run's "
            "loss; leave it out, or one of the two"
        )
    return given


def _single_run(fit: Fit, arguments: argparse.Namespace) -> int:
    flops = fit.flops_law.scale * arguments.params**fit.flops_law.power * arguments.tokens
    reasons = run_doubts(fit, arguments.params, arguments.tokens)
    if not arguments.force:
        refuse_wild(reasons)
    loss, more = loss_of_run(fit, arguments.params, arguments.tokens), run_lines(fit, arguments)
    size, tokens = amount(arguments.params), amount(arguments.tokens)
    print(
        f"loss of N = {size} over D = {tokens} ({flops:.3g} FLOPs) by {law_of_runs(fit).title}: "
        f"{shown(loss, as_loss)}"
        f"{'' if math.isnan(loss.low) else f', a {LEVEL}% interval'}"
    )
    for line in (*more, *(f"doubt: {doubt}" for doubt in reasons)):
        print(line)
    return 0


def _nearest(base: RunConfig, chosen: Forecast, arguments: argparse.Namespace) -> None:
    family = family_of(base, arguments)
    shaped = family.nearest(chosen.parameters.value)
    family.refuse_far(shaped, chosen.parameters.value)
    rule = rule_of(base, arguments)
    run = with_budget(shaped, chosen.flops.value, rule, arguments.lanes_multiple)
    run = replace(run, name=f"{base.name}-c{chosen.flops.value:.3g}".replace("+", ""))
    cost, model = cost_of(run), run.model
    print(
        f"nearest legal run: {counted(model.num_layers, 'layer')}, d_model {model.d_model}, "
        f"{counted(model.num_heads, 'head')} of {model.head_width}: N {amount(cost.parameters)}, "
        f"D {amount(cost.tokens)}, {cost.flops:.3g} FLOPs; {counted(run.optim.steps, 'step')} of "
        f"{counted(cost.tokens_per_step, 'token')}, "
        f"learning rate {run.optim.learning_rate:.3g}"
    )
    if arguments.write:
        header = (
            f"# The optimum at {chosen.flops.value:.3g} FLOPs by {chosen.approach}: "
            f"loss {shown(chosen.loss, as_loss)}\n"
            f"# Written by 'pretrain scale predict' from {arguments.runs.name}; rate and batch: "
            f"{rule_name(arguments)}\n"
        )
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.write, header + dump_yaml(to_tree(run)))
        print(f"written: {arguments.write}")
