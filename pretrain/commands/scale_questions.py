"""Questions of `pretrain scale predict` beyond the compute-optimal run: serving, fixed ratios and
repeated data, all by approach 3."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_pipeline.errors import ConfigError
from data_pipeline.sizes import amount_of
from pretrain.scaling.fit import Fit
from pretrain.scaling.frontier import Approach
from pretrain.scaling.intervals import amount, as_loss, as_size, shown
from pretrain.scaling.lifetime import (
    SERVED,
    SIZES,
    Lifetime,
    at_ratio,
    at_size,
    best_in_all,
    cheapest_at_loss,
    compute_optimal,
)
from pretrain.scaling.predict import Forecast, preferred, refuse_wild, run_doubts
from pretrain.scaling.repeats import best_with_repeats, effective_tokens, loss_of_run_with_repeats
from pretrain.terminal.text import fitted_table, flops_text

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
    more = best.loss.value / best.unlimited.value - 1
    verdict = ", as good as new tokens" if more < NEGLIGIBLE else ""
    lines = (
        f"with {amount(unique)} unique tokens: N {shown(best.parameters, as_size)}, D "
        f"{shown(best.tokens, as_size)}, loss {shown(best.loss, as_loss)}; "
        f"{_worth(best.tokens.value, unique)}",
        f"the loss is {more:+.2%} of that without repeats{verdict} (constants of repeated data: "
        "Muennighoff et al. 2023)",
    )
    run = compute_optimal(law, flops, 0.0)
    found = replace(run, parameters=best.parameters, tokens=best.tokens, loss=best.loss)
    return Answer(lines=lines, forecast=_forecast(f"3, {amount(unique)} unique tokens", found))


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
        unanswered=0.0,
    )
