"""`pretrain scale predict`: the optimum for a budget, a size or a number of tokens, and what to
train for serving or over repeated data.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from foundation.cli import Answer, add_json
from foundation.errors import ConfigError
from foundation.files import refuse_overwrite, write_text
from foundation.settings import amount_of, load_config, to_tree
from foundation.yaml_files import dump_yaml
from pretrain.commands.output_paths import check_output_file
from pretrain.commands.scale import add_family, add_runs, rule_name, rule_of
from pretrain.commands.scale_fit import fit_of
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.fit import TITLES, Fit, loss_interval
from pretrain.scaling.intervals import LEVEL, Interval, amount, as_loss, as_size, shown
from pretrain.scaling.predict import (
    Run,
    best_with_repeats,
    cheapest_at_loss,
    compute_optimal,
    doubts,
    effective_tokens,
    law_of_runs,
    near_optimal_line,
    optimal_flops,
    preferred,
    refuse_wild,
    run_doubts,
)
from pretrain.scaling.recipe import FAR_SIZE, Family, with_budget
from pretrain.scaling.report import choice_line, numbers_at, warning_lines
from pretrain.terminal.text import counted, fitted_table, flops_text

LARGEST = 1e30  # tokens
NEGLIGIBLE = 0.01  # of a loss: so little a run with repeats may lose to be called as good


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
    add("--law", choices=list(TITLES), default="", help="law whose optimum is written")
    base = "base experiment, whose family of shapes is chosen from"
    add("--experiment", type=Path, metavar="FILE", help=base)
    written = "write the nearest legal run here, as an experiment file"
    add("--write", type=Path, metavar="FILE", help=written)
    served = "the run of the same loss that is cheapest to train and to serve this many tokens"
    add("--inference-tokens", type=amount_of("tokens"), default=0.0, metavar="T", help=served)
    unique = "the best run over a corpus of this many tokens, repeated as often as it pays"
    add("--unique-tokens", type=amount_of("tokens"), default=0.0, metavar="U", help=unique)
    add_family(parser)
    force = "predict even far from the fitted runs"
    add("--force", action="store_true", help=force)
    add_json(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Return the optima by each law and, with --write, write the experiment file."""
    _check(arguments)
    base = None
    if arguments.experiment:
        base = with_vocabulary(load_config(RunConfig, arguments.experiment))
    fit = fit_of(arguments)
    if arguments.tokens and arguments.params:
        return _single_run(fit, arguments)
    approach = preferred(fit, arguments.law)
    flops_of = {
        item.key: arguments.flops
        or optimal_flops(item, fit.flops_law, arguments.tokens, arguments.params)
        for item in fit.approaches
    }
    flops = flops_of[approach.key]
    if not math.isfinite(flops):
        raise ConfigError(f"by {approach.title} the optimum does not grow with the FLOPs")
    reasons = _not_refused(doubts(fit, flops, approach), arguments)
    at = math.log(flops)
    first = Chosen(approach.title, approach.parameters(at), approach.loss(at), flops, [])
    chosen = [first, *_served(fit, flops, arguments), *_repeated(fit, flops, arguments)]
    near = near_optimal_line(fit, flops, approach)
    lines = [
        *warning_lines(fit),
        f"by {arguments.law}, as asked" if arguments.law else choice_line(fit),
        f"the compute-optimal run by each law; {LEVEL}% intervals",
        fitted_table(_table(fit, flops_of)),
        *reasons,
        *(
            [f"{approach.title} without an interval: {why}"]
            if (why := approach.no_interval)
            else []
        ),
        *([near] if near else []),
        *(line for each in chosen for line in each.lines),
    ]
    if base:
        lines += _nearest(base, chosen[-1], arguments)
    values = [
        {name: value for name, value in vars(each).items() if name != "lines"} for each in chosen
    ]
    return Answer("\n".join(lines), values)


def _check(arguments: argparse.Namespace) -> None:
    """ConfigError for questions that contradict each other, and files that cannot be written."""
    asked = [name for name in ("flops", "tokens", "params") if getattr(arguments, name)]
    if asked not in (["flops"], ["tokens"], ["params"], ["tokens", "params"]):
        raise ConfigError(
            "give a positive --flops, --tokens or --params; --tokens and --params together ask "
            "for one run's loss"
        )
    for name in (*asked, "inference_tokens", "unique_tokens"):
        if not 0 <= getattr(arguments, name) <= LARGEST:
            flag = f"--{name.replace('_', '-')} {getattr(arguments, name):g}"
            raise ConfigError(f"{flag}: expected a number above 0 and at most {LARGEST:g}")
    if arguments.write:
        if not arguments.experiment:
            raise ConfigError(
                "--write needs --experiment, the experiment whose family of shapes to choose from"
            )
        check_output_file("--write", arguments.write, "best.yaml")
        refuse_overwrite(arguments.write)
        if arguments.inference_tokens and arguments.unique_tokens:
            raise ConfigError(
                "--inference-tokens and --unique-tokens have different answers; give one with "
                "--write"
            )
    idle = ("law", "experiment", "inference_tokens", "unique_tokens")
    if len(asked) == 2 and (given := [name for name in idle if getattr(arguments, name)]):
        raise ConfigError(
            f"--{given[0].replace('_', '-')} has no effect with both --tokens and --params, which "
            "ask for one run's loss; leave it out, or one of the two"
        )


def _not_refused(reasons: list[str], arguments: argparse.Namespace) -> list[str]:
    """The doubts as lines with --force; without, ConfigError if there are any."""
    if not arguments.force:
        refuse_wild(reasons)
    return [f"doubt: {each}" for each in reasons]


def _table(fit: Fit, flops_of: dict[str, float]) -> list[list[str]]:
    """Heads and a row per law."""
    rows = [["law", "C", "N*", "D*", "loss"]]
    for item in fit.approaches:
        flops = flops_of[item.key]
        numbers = [shown(value, text) for _, value, text in numbers_at(fit, item, flops)[:3]]
        rows.append([item.title, flops_text(flops), *numbers])
    return rows


def _single_run(fit: Fit, arguments: argparse.Namespace) -> Answer:
    law, size, tokens = law_of_runs(fit), arguments.params, arguments.tokens
    reasons = _not_refused(run_doubts(fit, size, tokens), arguments)
    flops = float(np.exp(fit.flops_law.log_flops(np.log(size), np.log(tokens))))
    loss = loss_interval(law, size, tokens)
    asked = f"N = {amount(size)} over D = {amount(tokens)} ({flops:.3g} FLOPs)"
    lines = [f"loss of {asked} by {law.title}: {shown(loss, as_loss)}", *reasons]
    return Answer("\n".join(lines), [{"law": law.title, "loss": loss, "flops": flops}])


@dataclass(frozen=True)
class Chosen:
    """A run that answers a question, the law it is by, and lines for the terminal."""

    law: str
    parameters: Interval
    loss: Interval
    flops: float
    lines: list[str]


def _nearest(base: RunConfig, answer: Chosen, arguments: argparse.Namespace) -> list[str]:
    """Describe, and write where wanted, the legal run nearest to the answer."""
    family = Family(base=base, keep_layers=arguments.keep_layers)
    shaped = family.nearest(answer.parameters.value, FAR_SIZE)
    run = with_budget(shaped, answer.flops, rule_of(base, arguments))
    run = replace(run, name=f"{base.name}-c{answer.flops:.3g}".replace("+", ""))
    cost, model = cost_of(run), run.model
    lines = [
        f"nearest legal run: {counted(model.num_layers, 'layer')}, d_model {model.d_model}, "
        f"{counted(model.num_heads, 'head')} of {model.head_width}: N {amount(cost.parameters)}, "
        f"D {amount(cost.tokens)}, {cost.flops:.3g} FLOPs; {counted(run.optim.steps, 'step')} of "
        f"{counted(cost.tokens_per_step, 'token')}, learning rate {run.optim.learning_rate:.3g}"
    ]
    if arguments.write:
        header = (
            f"# The optimum at {answer.flops:.3g} FLOPs by {answer.law}: loss "
            f"{shown(answer.loss, as_loss)}\n"
            f"# Written by 'pretrain scale predict' from {arguments.runs.name}; rate and batch: "
            f"{rule_name(arguments)}\n"
        )
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.write, header + dump_yaml(to_tree(run)))
        lines.append(f"written: {arguments.write}")
    return lines


def _chosen(
    fit: Fit, law: str, run: Run, lines: list[str], arguments: argparse.Namespace
) -> list[Chosen]:
    """The run with its doubts; ConfigError where it is far from the fitted runs."""
    reasons = run_doubts(fit, run.parameters.value, run.tokens.value)
    lines = [*lines, *_not_refused(reasons, arguments)]
    return [Chosen(law, run.parameters, run.loss, run.training.value, lines)]


def _served(fit: Fit, flops: float, arguments: argparse.Namespace) -> list[Chosen]:
    if not (served := arguments.inference_tokens):
        return []
    law = law_of_runs(fit)
    optimal, cheapest = compute_optimal(law, flops, served), cheapest_at_loss(law, flops, served)
    rows = [["run", "N", "D", "loss", "training", "serving", "in all"]]
    for name, run in (("compute-optimal", optimal), ("least FLOPs in all", cheapest)):
        costs = (flops_text(each.value) for each in (run.training, run.serving, run.total))
        sizes = shown(run.parameters, as_size), shown(run.tokens, as_size)
        rows.append([name, *sizes, shown(run.loss, as_loss), *costs])
    saved = 1 - cheapest.total.value / optimal.total.value
    lines = [
        f"to serve {amount(served)} tokens, each a third of a training token's FLOPs:",
        fitted_table(rows),
        f"the smaller run saves {saved:.1%} of the FLOPs in all",
    ]
    return _chosen(fit, f"{law.title}, {amount(served)} served", cheapest, lines, arguments)


def _repeated(fit: Fit, flops: float, arguments: argparse.Namespace) -> list[Chosen]:
    if not (unique := arguments.unique_tokens):
        return []
    law = law_of_runs(fit)
    best = best_with_repeats(law, flops, unique)
    more = best.loss.value / law.loss(math.log(flops)).value - 1
    verdict = ", as good as new tokens" if more < NEGLIGIBLE else ""
    worth = "no token is repeated"
    if (tokens := best.tokens.value) > unique:
        new = as_size(effective_tokens(tokens, unique))
        worth = f"{tokens / unique:.3g} epochs, worth {new} new tokens"
    lines = [
        f"with {amount(unique)} unique tokens: N {shown(best.parameters, as_size)}, D "
        f"{shown(best.tokens, as_size)}, loss {shown(best.loss, as_loss)}; {worth}",
        f"the loss is {more:+.2%} of that without repeats{verdict} (constants of repeated data: "
        "Muennighoff et al. 2023)",
    ]
    return _chosen(fit, f"{law.title}, {amount(unique)} unique tokens", best, lines, arguments)
