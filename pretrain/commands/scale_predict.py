"""`pretrain scale predict`: the optimum of a budget, or one run's loss."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from foundation.cli import Answer, add_json
from foundation.errors import ConfigError
from foundation.files import refuse_overwrite, write_text
from foundation.settings import load_config, to_tree
from foundation.yaml_files import dump_yaml
from pretrain.commands.output_paths import check_output_file
from pretrain.commands.scale import (
    add_family,
    add_question,
    add_runs,
    check_question,
    rule_name,
    rule_of,
)
from pretrain.commands.scale_fit import fit_of
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.fit import TITLES, Fit, loss_interval
from pretrain.scaling.frontier import Approach
from pretrain.scaling.intervals import LEVEL, amount, as_loss, shown
from pretrain.scaling.predict import (
    doubts,
    law_of_runs,
    near_optimal_line,
    preferred,
    refuse_wild,
    run_doubts,
)
from pretrain.scaling.recipe import FAR_SIZE, Family, with_budget
from pretrain.scaling.report import choice_line, numbers_at, warning_lines
from pretrain.terminal.text import counted, fitted_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale predict`."""
    add_runs(parser)
    add_question(parser)
    add = parser.add_argument
    add("--law", choices=list(TITLES), default="", help="law whose optimum is written")
    base = "base experiment, whose family of shapes is chosen from"
    add("--experiment", type=Path, metavar="FILE", help=base)
    written = "write the nearest legal run here, as an experiment file"
    add("--write", type=Path, metavar="FILE", help=written)
    add_family(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Return the optima by each law and, with --write, write the experiment file."""
    _check(arguments)
    base = None
    if arguments.experiment:
        base = with_vocabulary(load_config(RunConfig, arguments.experiment))
    fit = fit_of(arguments)
    if arguments.params:
        return _single_run(fit, arguments)
    flops, approach = arguments.flops, preferred(fit, arguments.law)
    at = math.log(flops)
    lines = [
        *warning_lines(fit),
        f"by {arguments.law}, as asked" if arguments.law else choice_line(fit),
        f"the compute-optimal run of {flops:.3g} FLOPs by each law; {LEVEL}% intervals",
        fitted_table(_table(fit, flops)),
        *_not_refused(doubts(fit, flops, approach), arguments),
    ]
    if why := approach.without_interval(at):
        lines.append(f"{approach.title} without an interval: {why}")
    if near := near_optimal_line(fit, flops, approach):
        lines.append(near)
    answer = {
        "law": approach.title,
        "parameters": approach.parameters(at),
        "loss": approach.loss(at),
        "flops": flops,
    }
    if base:
        lines += _nearest(base, approach, arguments)
    return Answer("\n".join(lines), [answer])


def _check(arguments: argparse.Namespace) -> None:
    """ConfigError for questions that contradict each other, and files that cannot be written."""
    check_question(arguments)
    if arguments.write:
        if not arguments.experiment:
            raise ConfigError(
                "--write needs --experiment, the experiment whose family of shapes to choose from"
            )
        check_output_file("--write", arguments.write, "best.yaml")
        refuse_overwrite(arguments.write)
    idle = ("law", "experiment")
    if arguments.params and (given := [name for name in idle if getattr(arguments, name)]):
        raise ConfigError(
            f"--{given[0]} has no effect with --params and --tokens, which ask "
            "for one run's loss; leave it out, or ask with --flops"
        )


def _not_refused(reasons: list[str], arguments: argparse.Namespace) -> list[str]:
    """The doubts as lines with --force; without, ConfigError if there are any."""
    if not arguments.force:
        refuse_wild(reasons)
    return [f"doubt: {each}" for each in reasons]


def _table(fit: Fit, flops: float) -> list[list[str]]:
    """Heads and a row per law."""
    rows = [["law", "N*", "D*", "loss"]]
    for item in fit.approaches:
        numbers = (shown(value, text) for _, value, text in numbers_at(fit, item, flops)[:3])
        rows.append([item.title, *numbers])
    return rows


def _single_run(fit: Fit, arguments: argparse.Namespace) -> Answer:
    law, size, tokens = law_of_runs(fit), arguments.params, arguments.tokens
    reasons = _not_refused(run_doubts(fit, size, tokens), arguments)
    flops = float(np.exp(fit.flops_law.log_flops(np.log(size), np.log(tokens))))
    loss = loss_interval(law, size, tokens)
    asked = f"N = {amount(size)} over D = {amount(tokens)} ({flops:.3g} FLOPs)"
    lines = [f"loss of {asked} by {law.title}: {shown(loss, as_loss)}", *reasons]
    return Answer("\n".join(lines), [{"law": law.title, "loss": loss, "flops": flops}])


def _nearest(base: RunConfig, law: Approach, arguments: argparse.Namespace) -> list[str]:
    """Describe, and write where wanted, the legal run nearest to the optimum."""
    flops, at = arguments.flops, math.log(arguments.flops)
    family = Family(base=base, keep_layers=arguments.keep_layers)
    shaped = family.nearest(law.parameters(at).value, FAR_SIZE)
    run = with_budget(shaped, flops, rule_of(base, arguments))
    run = replace(run, name=f"{base.name}-c{flops:.3g}".replace("+", ""))
    cost, model = cost_of(run), run.model
    lines = [
        f"nearest legal run: {counted(model.num_layers, 'layer')}, d_model {model.d_model}, "
        f"{counted(model.num_heads, 'head')} of {model.head_width}: N {amount(cost.parameters)}, "
        f"D {amount(cost.tokens)}, {cost.flops:.3g} FLOPs; {counted(run.optim.steps, 'step')} of "
        f"{counted(cost.tokens_per_step, 'token')}, learning rate {run.optim.learning_rate:.3g}"
    ]
    if arguments.write:
        header = (
            f"# The optimum at {flops:.3g} FLOPs by {law.title}: loss "
            f"{shown(law.loss(at), as_loss)}\n"
            f"# Written by 'pretrain scale predict' from {arguments.runs.name}; rate and batch: "
            f"{rule_name(arguments)}\n"
        )
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.write, header + dump_yaml(to_tree(run)))
        lines.append(f"written: {arguments.write}")
    return lines
