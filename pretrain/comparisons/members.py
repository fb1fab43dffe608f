"""The results of a comparison: each member at its best rate, its losses, speed and probes.

Losses are in nats per token of the validation split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from foundation.errors import DataError
from pretrain.comparisons.comparison import member_name
from pretrain.reporting.members import COLUMNS, NOTE, Member, beside, member_rows
from pretrain.scaling.collect import FAR, PROBED, Row
from pretrain.scaling.intervals import amount
from pretrain.terminal.text import flops_text

VARIANT_COLUMNS = COLUMNS | {
    f"loss from token {FAR}": "{far_loss:.4f}",
    "needle": "{needle:.1%}",
    "rate": "{rate:g}{edge}",
    "state of a lane": "{lane_bytes}B",
    "tokens/s": "{tokens_per_second:,.0f}",
    "parameters": "{parameters}",
    "tokens": "{tokens}",
}


@dataclass(frozen=True, kw_only=True)
class MemberResult:
    """One member at its best rate; losses are of the validation split, in nats per token."""

    member: str
    runs: Sequence[Row]  # at that rate, one per seed
    seeds: Member  # its losses by seed
    num_rates: int  # tried
    is_edge: bool  # the best rate is the lowest or the highest of several
    tokens_per_second: float  # of training alone; the median of all runs of the member
    probes: Mapping[str, float]  # means over seeds, by column of the sweep's table

    @property
    def first(self) -> Row:
        """One of its runs, for what all of them share."""
        return self.runs[0]

    @property
    def loss(self) -> float:
        return self.seeds.loss

    @property
    def unpaired(self) -> list[str]:
        """The probes that some of its runs lack."""
        names = {
            name.removeprefix(PROBED).partition("/")[0]
            for row in self.runs
            for name in row.tasks.keys() - self.probes.keys()
        }
        return sorted(names)

    def probed(self, name: str) -> dict[int, float]:
        """Return the values of the columns probes/NAME/NUMBER, by NUMBER."""
        parts = ((key.rpartition("/"), value) for key, value in self.probes.items())
        return {int(last): value for (kind, _, last), value in parts if kind == PROBED + name}


def member_results(rows: Sequence[Row]) -> list[MemberResult]:
    """Return members whose runs have all ended, each at the rate of the lowest mean over seeds; the
    member with the lowest of these first."""
    results = []
    for member in dict.fromkeys(member_name(row.name) for row in rows):
        mine = [row for row in rows if member_name(row.name) == member]
        if not all(row.progress == 1.0 and row.loss != "" for row in mine):
            continue
        by_rate: dict[float, list[Row]] = {}
        for row in mine:
            by_rate.setdefault(float(row.learning_rate), []).append(row)
        best = min(by_rate.values(), key=lambda runs: fmean(float(row.loss) for row in runs))
        if any(row.excluded for row in best):
            continue
        speeds = [float(row.D) / float(row.seconds) for row in mine if row.seconds]
        probed = {
            name: [row.tasks[name] for row in best]
            for name in best[0].tasks
            if all(name in row.tasks for row in best)  # else seeds would not be paired
        }
        edges = min(by_rate), max(by_rate)
        result = MemberResult(
            member=member,
            runs=best,
            seeds=Member(
                member,
                {int(row.seed): float(row.loss) for row in best},
                {int(row.seed): row.text for row in best},
            ),
            num_rates=len(by_rate),
            is_edge=len(by_rate) > 1 and best[0].learning_rate in edges,
            tokens_per_second=median(speeds) if speeds else math.nan,
            probes={name: fmean(values) for name, values in probed.items()},
        )
        results.append(result)
    if not results:
        raise DataError("no member has ended at all of its rates and seeds; let the sweep finish")
    return sorted(results, key=lambda result: result.loss)


def baseline_of(results: Sequence[MemberResult]) -> MemberResult:
    """Return the comparison's baseline, by default the first."""
    return next((result for result in results if result.first.baseline), results[0])


def variant_numbers(results: Sequence[MemberResult]) -> list[dict[str, Any]]:
    """Return the numbers of each member, lowest loss first."""
    of_losses = beside([result.seeds for result in results], baseline_of(results).member)
    return [
        numbers
        | {
            "far_loss": result.probes.get(f"{PROBED}far_loss"),
            "needle": fmean(needle) if (needle := result.probed("needle").values()) else None,
            "rate": float(result.first.learning_rate),
            "edge": "*" * result.is_edge,
            "lane_bytes": result.first.lane_bytes,
            "tokens_per_second": result.tokens_per_second,
            "parameters": result.first.N,
            "tokens": result.first.D,
        }
        for numbers, result in zip(of_losses, results, strict=True)
    ]


def variant_table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a table of texts, heads first; a star marks the lowest or highest rate tried."""
    sizes = ("lane_bytes", "parameters", "tokens")
    texts = [{**row, **{name: amount(float(row[name])) for name in sizes}} for row in rows]
    return member_rows(texts, VARIANT_COLUMNS)


def variant_notes(results: Sequence[MemberResult]) -> list[str]:
    """Say what the columns are, and what they rest on."""
    costs = [float(row.C) for result in results for row in result.runs]
    is_tuned = any(result.num_rates > 1 for result in results)
    rates = "losses are at each member's best rate" if is_tuned else "one rate each, not tuned"
    range_of_costs = " to ".join(dict.fromkeys(map(flops_text, (min(costs), max(costs)))))
    notes = [
        f"every run trained for {range_of_costs} FLOPs; {rates}; tokens/s is the median of a "
        "member's runs: compare it only under equal load",
        NOTE.format(baseline_of(results).member).removesuffix("."),
    ]
    if tokens := {result.probes.get(f"{PROBED}position_tokens", 0) for result in results} - {0}:
        counts = " or ".join(f"{count:,.0f}" for count in sorted(tokens))
        notes.append(
            f"losses by position and from token {FAR} are of '--probe position', on {counts} tokens"
        )
    notes += [
        f"not in the row of {result.member}, as some seeds lack them: {', '.join(result.unpaired)}"
        for result in results
        if result.unpaired
    ]
    if probed := [result for result in results if result.probed("needle")]:
        distances = ", ".join(map(str, probed[0].probed("needle")))
        chance = probed[0].probes[f"{PROBED}chance"]
        notes.append(f"needle: accuracy over distances of {distances}; chance is {chance:.1%}")
    if any(result.is_edge for result in results):
        notes.append("a star marks the lowest or highest rate: a better one may lie beyond it")
    return notes
