"""The results of a comparison: each member at its best rate, its losses, speed and probes.

Losses are in nats per token of the validation split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from foundation.errors import DataError
from pretrain.comparisons.comparison import member_name
from pretrain.reporting.members import NOTE, Member, member_rows
from pretrain.scaling.collect import FAR, PROBED, Row
from pretrain.scaling.intervals import amount
from pretrain.terminal.text import flops_text, format_number


@dataclass(frozen=True, kw_only=True)
class MemberResult:
    """One member at its best rate; losses are of the validation split, in nats per token."""

    member: str
    first: Row  # one of its runs at that rate, for what all of them share
    seeds: Member  # its losses by seed
    is_edge: bool  # the best rate is the lowest or the highest one tried
    tokens_per_second: float  # of training alone; the median of all runs of the member
    probes: Mapping[str, float]  # means over seeds, by column of the sweep's table

    @property
    def loss(self) -> float:
        return self.seeds.loss

    def probed(self, name: str) -> dict[int, float]:
        """Return the values of the columns probes/NAME/NUMBER, by NUMBER."""
        parts = ((key.rpartition("/"), value) for key, value in self.probes.items())
        return {int(last): value for (kind, _, last), value in parts if kind == PROBED + name}


def member_results(rows: Sequence[Row]) -> list[MemberResult]:
    """Return members whose runs have all ended, each at the rate of the lowest mean over seeds."""
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
        first, speeds = best[0], [float(row.D) / float(row.seconds) for row in mine if row.seconds]
        probed = {
            name: [row.tasks[name] for row in best if name in row.tasks]
            for row in best
            for name in row.tasks
        }
        edges = min(by_rate), max(by_rate)
        result = MemberResult(
            member=member,
            first=first,
            seeds=Member(
                member,
                {int(row.seed): float(row.loss) for row in best},
                {int(row.seed): row.text for row in best},
            ),
            is_edge=len(by_rate) > 1 and first.learning_rate in edges,
            tokens_per_second=median(speeds) if speeds else math.nan,
            probes={name: fmean(values) for name, values in probed.items()},
        )
        results.append(result)
    if not results:
        raise DataError("no member has ended at all of its rates and seeds; let the sweep finish")
    return results


def variant_table(results: Sequence[MemberResult]) -> list[list[str]]:
    """Return heads and rows, lowest loss first; a star marks the lowest or highest rate tried."""
    heads = [f"loss from token {FAR}", "needle", "rate"]
    heads += ["state of a lane", "tokens/s", "parameters", "tokens"]
    losses, rows = member_rows([result.seeds for result in results]), []
    by_name = {result.member: result for result in results}
    for of_seeds in losses[1:]:
        result = by_name[of_seeds[0]]
        needle = list(result.probed("needle").values())
        rows.append(
            [
                *of_seeds,
                format_number(result.probes.get(f"{PROBED}far_loss"), ".4f"),
                format_number(float(np.mean(needle)) if needle else None, ".1%"),
                f"{result.first.learning_rate:g}{'*' * result.is_edge}",
                f"{amount(float(result.first.lane_bytes))}B",
                format_number(result.tokens_per_second, ",.0f"),
                amount(float(result.first.N)),
                amount(float(result.first.D)),
            ]
        )
    return [[*losses[0], *heads], *rows]


def variant_notes(results: Sequence[MemberResult]) -> list[str]:
    """Say what the columns are, and what they rest on."""
    example = results[0]
    notes = [
        f"every run trained for {flops_text(float(example.first.C))} FLOPs; losses are means over "
        "seeds at the member's best rate, tokens/s the median of the member's runs",
        NOTE[0].lower() + NOTE[1:].removesuffix("."),
    ]
    if probed := [result for result in results if result.probed("needle")]:
        distances = ", ".join(map(str, probed[0].probed("needle")))
        chance = probed[0].probes[f"{PROBED}chance"]
        notes.append(f"needle: accuracy over distances of {distances}; chance is {chance:.1%}")
    if any(result.is_edge for result in results):
        notes.append("a star marks the lowest or highest rate: a better one may lie beyond it")
    return notes
