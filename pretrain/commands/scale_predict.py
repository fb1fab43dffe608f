"""`pretrain scale predict`: the optimum for a budget, a size or a number of tokens, and what to
train for serving, at a fixed ratio or over repeated data.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.errors import ConfigError
from foundation.files import refuse_overwrite, write_text
from foundation.settings import amount_of, load_config, to_tree
from foundation.yaml_files import dump_yaml
from pretrain.commands.output_paths import check_output_file
from pretrain.commands.scale import (
    add_family,
    add_runs,
    family_of,
    rule_name,
    rule_of,
)
from pretrain.commands.scale_fit import fit_of
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.scaling.fit import Fit
from pretrain.scaling.frontier import Approach
from pretrain.scaling.intervals import LEVEL, amount, as_loss, as_size, shown
from pretrain.scaling.predict import (
    BAND,
    SERVED,
    SIZES,
    Forecast,
    Lifetime,
    at_ratio,
    at_size,
    best_in_all,
    best_with_repeats,
    cheapest_at_loss,
    compute_optimal,
    doubts,
    effective_tokens,
    forecast,
    law_of_runs,
    loss_of_run,
    loss_of_run_with_repeats,
    near_optimal_band,
    preferred,
    refuse_unknown,
    refuse_wild,
    run_doubts,
)
from pretrain.scaling.recipe import with_budget
from pretrain.scaling.report import choice_line, warning_lines
from pretrain.terminal.text import counted, fitted_table, flops_text

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


MOST_TRAINING = 10.0
LARGEST = 1e30  # tokens, or tokens per parameter
NEGLIGIBLE = 0.01  # of a loss: so little a run with repeats may lose to be called as good


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Lines for the terminal, and the run that answers the question."""

    lines: tuple[str, ...]
    forecast: Forecast


def add_questions(parser: argparse.ArgumentParser) -> None:
    """The flags of these questions."""
    add = parser.add_argument
    served = "the run of the same loss that is cheapest to train and to serve this many tokens"
    add("--inference-tokens", type=amount_of("tokens"), metavar="T", help=served)
    ratio = "the run that reads this many tokens per parameter"
    add("--tokens-per-parameter", type=float, metavar="D/N", help=ratio)
    unique = "the best run over a corpus of this many tokens, repeated as often as it pays"
    add("--unique-tokens", type=amount_of("tokens"), metavar="U", help=unique)


def asked(arguments: argparse.Namespace) -> list[str]:
    """The flags of these questions that are given; ConfigError for numbers that are not positive,
    and for several with --write."""
    names = ("inference_tokens", "tokens_per_parameter", "unique_tokens")
    for name in names:
        if (value := getattr(arguments, name)) is not None and not 0 < value <= LARGEST:
            flag = f"--{name.replace('_', '-')}={value:g}"
            raise ConfigError(f"{flag} must be above 0 and at most {LARGEST:g}")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]
    if len(given) > 1 and arguments.write:
        raise ConfigError(f"{' and '.join(given)} have different answers; give one with --write")
    return given


def answers(fit: Fit, flops: float, arguments: argparse.Namespace) -> list[Answer]:
    """The answer to each question at these training FLOPs.

    ConfigError if approach 3 is missing, or an answer is far from the fitted runs (but --force).
    """
    if not asked(arguments):
        return []
    law = preferred(fit, "parametric")
    found = []
    if arguments.inference_tokens:
        found.append(_served(law, flops, arguments.inference_tokens))
    if arguments.tokens_per_parameter:
        found.append(_at_ratio(law, flops, arguments.tokens_per_parameter))
    if arguments.unique_tokens:
        found.append(_repeated(law, flops, arguments.unique_tokens))
    doubted = [_with_doubts(fit, answer) for answer in found]
    if not arguments.force:
        refuse_wild([doubt for _, doubts in doubted for doubt in doubts])
    return [answer for answer, _ in doubted]


def run_lines(fit: Fit, arguments: argparse.Namespace) -> list[str]:
    """The lines about one run of --params over --tokens."""
    given = asked(arguments)
    if "--tokens-per-parameter" in given:
        raise ConfigError(
            "--tokens-per-parameter has no effect with both --tokens and --params, whose ratio "
            "is known; leave it out"
        )
    lines = []
    if served := arguments.inference_tokens:
        training = fit.flops_law.scale * arguments.params**fit.flops_law.power * arguments.tokens
        serving = training * served * SERVED / arguments.tokens
        lines.append(
            f"serving {amount(served)} tokens: {serving:.3g} FLOPs, with training "
            f"{training + serving:.3g}"
        )
    if unique := arguments.unique_tokens:
        law = preferred(fit, "parametric")
        loss = loss_of_run_with_repeats(law, arguments.params, arguments.tokens, unique)
        lines.append(
            f"with {amount(unique)} unique tokens: loss {shown(loss, as_loss)}; "
            f"{_worth(arguments.tokens, unique)}"
        )
    return lines


def _with_doubts(fit: Fit, answer: Answer) -> tuple[Answer, list[str]]:
    found = answer.forecast
    doubts = run_doubts(fit, found.parameters.value, found.tokens.value)
    lines = tuple(f"doubt: {doubt}" for doubt in doubts)
    return replace(answer, lines=answer.lines + lines), doubts


def _served(law: Approach, flops: float, served: float) -> Answer:
    optimal, cheapest = compute_optimal(law, flops, served), cheapest_at_loss(law, flops, served)
    runs = {
        "compute-optimal": optimal,
        "the same loss, least FLOPs in all": cheapest,
        f"least loss for {flops:.3g} FLOPs in all": best_in_all(law, flops, served),
    }
    heads = ["run", "N", "D", "D/N", "loss", "training", "serving", "in all"]
    table = fitted_table([heads, *(_row(name, run) for name, run in runs.items())])
    saved = 1 - cheapest.total.value / optimal.total.value
    size = math.log(optimal.parameters.value)
    equal = [at_size(law, flops, size + math.log(part), served) for part in SIZES]
    lines = (
        f"to serve {amount(served)} tokens, each a third of a training token's FLOPs:",
        table,
        f"the smaller run saves {saved:.1%} of the FLOPs in all",
        f"the same loss, {as_loss(optimal.loss.value)}, at other sizes:",
        fitted_table(_trade_off(equal, optimal)),
    )
    return Answer(lines=lines, forecast=_forecast(f"3, {amount(served)} served", cheapest))


def _row(name: str, run: Lifetime) -> list[str]:
    return [
        name,
        shown(run.parameters, as_size),
        shown(run.tokens, as_size),
        f"{run.tokens.value / run.parameters.value:.3g}",
        shown(run.loss, as_loss),
        *(flops_text(each.value) for each in (run.training, run.serving, run.total)),
    ]


def _trade_off(runs: Sequence[Lifetime], optimal: Lifetime) -> list[list[str]]:
    """Heads and rows, without sizes that reach the loss at over MOST_TRAINING times the FLOPs."""
    rows = [["N / N*", "N", "D", "D/N", "training / optimal", "in all / optimal"]]
    for part, run in zip(SIZES, runs, strict=True):
        if run.training.value <= MOST_TRAINING * optimal.training.value:
            rows.append(
                [
                    f"{part:g}",
                    as_size(run.parameters.value),
                    shown(run.tokens, as_size),
                    f"{run.tokens.value / run.parameters.value:.3g}",
                    f"{run.training.value / optimal.training.value:.3f}",
                    f"{run.total.value / optimal.total.value:.3f}",
                ]
            )
    return rows


def _at_ratio(law: Approach, flops: float, ratio: float) -> Answer:
    run, optimal = at_ratio(law, flops, ratio), compute_optimal(law, flops, 0.0)
    more = run.loss.value / optimal.loss.value - 1
    line = (
        f"at {ratio:g} tokens per parameter: N {as_size(run.parameters.value)}, D "
        f"{as_size(run.tokens.value)}, loss {shown(run.loss, as_loss)}, {more:+.2%} of the "
        f"compute-optimal run's (D/N {optimal.tokens.value / optimal.parameters.value:.3g})"
    )
    return Answer(lines=(line,), forecast=_forecast(f"3 at D/N of {ratio:g}", run))


def _repeated(law: Approach, flops: float, unique: float) -> Answer:
    best = best_with_repeats(law, flops, unique)
    more = best.loss.value / law.loss(math.log(flops)).value - 1
    verdict = ", as good as new tokens" if more < NEGLIGIBLE else ""
    lines = (
        f"with {amount(unique)} unique tokens: N {shown(best.parameters, as_size)}, D "
        f"{shown(best.tokens, as_size)}, loss {shown(best.loss, as_loss)}; "
        f"{_worth(best.tokens.value, unique)}",
        f"the loss is {more:+.2%} of that without repeats{verdict} (constants of repeated data: "
        "Muennighoff et al. 2023)",
    )
    return Answer(lines=lines, forecast=_forecast(f"3, {amount(unique)} unique tokens", best))


def _worth(tokens: float, unique: float) -> str:
    if tokens <= unique:
        return "no token is repeated"
    worth = effective_tokens(tokens, unique)
    return f"{tokens / unique:.3g} epochs, worth {as_size(worth)} new tokens"


def _forecast(approach: str, run: Lifetime) -> Forecast:
    return Forecast(
        approach=approach,
        flops=run.training,
        parameters=run.parameters,
        tokens=run.tokens,
        loss=run.loss,
    )
