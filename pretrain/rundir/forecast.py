"""Which run a forecast card is about: what a start and a grade check.

`pretrain/scaling/forecast.py` writes and reads whole cards.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from foundation.errors import ConfigError, DataError
from foundation.typed_values import InvalidValue, from_tree
from foundation.yaml_files import read_tree
from pretrain.config.run import RunConfig
from pretrain.costs.flops import run_cost

Card = TypeVar("Card", bound="HasFormat")
FORMAT = 1
SAME = 1.1  # times the forecast number, either way: a run beyond is another question


class HasFormat(Protocol):
    """A card, or what a reader needs of it."""

    @property
    def format(self) -> int: ...


@dataclass(frozen=True)
class Number:
    """The forecast of a number, without its interval."""

    value: float


@dataclass(frozen=True)
class ForecastRun:
    """The run that is forecast: of so many FLOPs, or `is_of_run` of this size over these tokens."""

    format: int
    is_of_run: bool
    flops: float
    parameters: Number
    tokens: Number


def read_forecast(path: Path, kind: type[Card], *, is_open: bool = False) -> Card:
    """Return a card as this type; DataError for any other file. `is_open`: it may have more."""
    try:
        card = from_tree(kind, read_tree(path), is_open=is_open, is_finite=True)
    except InvalidValue as error:
        raise DataError(f"{path} is no forecast card: {error}") from None
    if card.format != FORMAT:
        raise DataError(f"{path}: found format {card.format}, expected {FORMAT}")
    return card


def check_subject(card: Path, config: RunConfig) -> None:
    """Raise ConfigError unless the card is about such a run, and DataError if it is no card."""
    subject = read_forecast(card, ForecastRun, is_open=True)
    cost = run_cost(config)
    pairs = {"FLOPs": (cost.flops, subject.flops)}
    if subject.is_of_run:  # its FLOPs may be counted otherwise in the table of runs
        pairs = {
            "parameters": (cost.parameters, subject.parameters.value),
            "tokens": (cost.tokens, subject.tokens.value),
        }
    for name, (own, forecast) in pairs.items():
        if not forecast / SAME <= own <= forecast * SAME:
            raise ConfigError(
                f"the run {config.name} has {own:.3g} {name}, and {card} is a forecast of "
                f"{forecast:.3g}; take the run that was forecast, or another card"
            )
