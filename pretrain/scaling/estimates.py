"""Each approach tried on the same runs; what these runs do not allow is kept as a reason, not an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from data_pipeline.errors import DataError
from pretrain.scaling.envelope import EnvelopeFit, fit_envelope
from pretrain.scaling.isoflop import IsoflopFit, fit_isoflop
from pretrain.scaling.law import FlopsLaw
from pretrain.scaling.lines import LawLine, Line
from pretrain.scaling.parametric import ParametricFit, fit_parametric
from pretrain.scaling.points import Array, Points

T = TypeVar("T")
TITLES = {"envelope": "1 envelope", "isoflop": "2 IsoFLOP", "parametric": "3 parametric"}


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The fits without intervals; an approach that has none has its reason in `unavailable`."""

    envelope: EnvelopeFit | None
    isoflop: IsoflopFit | None
    parametric: ParametricFit | None
    unavailable: dict[str, str]

    def lines(self, flops_law: FlopsLaw) -> dict[str, Line]:
        """The compute-optimal line of each approach there is."""
        found: dict[str, Line] = {}
        if self.envelope:
            found["envelope"] = self.envelope.frontier
        if self.isoflop:
            found["isoflop"] = self.isoflop.frontier
        if self.parametric:
            found["parametric"] = LawLine(self.parametric.law.theta, flops_law)
        return found


def estimate(points: Points, training: Mapping[str, Array] | None = None) -> Estimates:
    """All three approaches on these runs; `training` holds measurements along them, for approach 1."""
    unavailable: dict[str, str] = {}

    def attempt(key: str, function: Callable[[], T]) -> T | None:
        try:
            return function()
        except DataError as error:
            unavailable[key] = str(error).removeprefix(f"{points.source}: ")
            return None

    return Estimates(
        envelope=attempt("envelope", lambda: fit_envelope(points, training)),
        isoflop=attempt("isoflop", lambda: fit_isoflop(points)),
        parametric=attempt("parametric", lambda: fit_parametric(points)),
        unavailable=unavailable,
    )
