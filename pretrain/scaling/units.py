"""Columns in other units than parameters, tokens, FLOPs and nats, recognized by their size.

Legend: P points.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from data_pipeline.errors import ConfigError, DataError
from pretrain.scaling.points import Array

LARGEST_LOSS = 13.0  # nats per token: guessing among 440,000 tokens; a larger one is a perplexity
PLAIN_RATIO = (0.3, 4.0)  # of C/6ND: for a Transformer-XL it is 0.65 to 2.4
TOKENS_PER_PARAMETER = (0.03, 5e3)
FEWEST_PARAMETERS, FEWEST_TOKENS = 1e3, 1e4  # of a model that anyone trains to fit a law
NEAR = 4.0  # a ratio within this factor of 1000^k is a matter of units
SAME_TEXT = 0.01  # relative spread of bits per nat: what is scored differs a little in its length
SCALABLE = ("parameters", "tokens", "flops", "loss")


def units_of(items: list[str]) -> dict[str, float]:
    """Factors from items such as `parameters=1e6`; ConfigError for anything else."""
    found = {}
    for item in items:
        role, equals, text = item.partition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not (equals and role in SCALABLE and 0 < factor < np.inf):
            raise ConfigError(
                f"--unit {item}: expected ROLE=FACTOR, a positive factor for one of the roles "
                f"{', '.join(SCALABLE)}, such as parameters=1e6"
            )
        found[role] = factor
    return found


def is_perplexity(column: str) -> bool:
    """Whether a column of losses contains perplexities by its name."""
    return re.search(r"ppl|perplexit", column, re.IGNORECASE) is not None


def refuse_perplexities(loss_P: Array, column: str, path: Path) -> None:
    """Raise DataError if the losses are too large to be any, as a whole."""
    if np.median(loss_P) > LARGEST_LOSS:
        raise DataError(
            f"{path}: {column} is {loss_P.min():.3g} to {loss_P.max():.3g}, expected losses in "
            "nats per token; perplexities are read from a column with 'perplexity' or 'ppl' in its "
            "name (--column loss=NAME), other units with --unit loss=FACTOR"
        )


def flops_note(parameters_P: Array, tokens_P: Array, flops_P: Array, path: Path) -> str:
    """What is unusual about C/6ND, empty if nothing; DataError if it is a matter of units."""
    ratio_P = flops_P / (6 * parameters_P * tokens_P)
    middle = float(np.median(ratio_P))
    thousands = round(np.log(middle) / np.log(1000))
    if thousands and max(middle / 1000.0**thousands, 1000.0**thousands / middle) < NEAR:
        raise DataError(
            f"{path}: C is {middle:.3g} times 6ND, a matter of units; if N is in millions, say "
            "--unit parameters=1e6, and likewise for tokens and flops"
        )
    low, high = PLAIN_RATIO
    if low <= middle <= high:
        return ""
    return (
        f"C/6ND is {ratio_P.min():.3g} to {ratio_P.max():.3g}: check that C is the training FLOPs "
        "of the whole run, and N all parameters"
    )


def sizes_note(parameters_P: Array, tokens_P: Array) -> str:
    """What is unusual about N, D and D/N, empty if nothing."""
    size, tokens = float(np.median(parameters_P)), float(np.median(tokens_P))
    low, high = TOKENS_PER_PARAMETER
    plain = low < tokens / size < high
    if plain and size >= FEWEST_PARAMETERS and tokens >= FEWEST_TOKENS:
        return ""
    return (
        f"the median run has {size:.3g} parameters and {tokens:.3g} tokens: is N, D or C in other "
        "units? Say so with --unit parameters=1e6, tokens=1e9 or flops=1e15"
    )


def bits_per_nat(bits_P: Array, loss_P: Array) -> float:
    """Bits per byte of a loss of 1 nat per token; NaN unless it is the same in all runs."""
    known_P = (bits_P > 0) & (bits_P < LARGEST_LOSS)  # not NaN
    ratio_P = bits_P[known_P] / loss_P[known_P]
    if not len(ratio_P) or np.ptp(ratio_P) > SAME_TEXT * ratio_P.min():
        return np.nan
    return float(np.median(ratio_P))


def bits_note(factor: float) -> str:
    """What a loss in nats per token is in bits per byte."""
    bytes_per_token = 1 / (np.log(2) * factor)
    return f"1 nat per token is {factor:.4g} bits per byte ({bytes_per_token:.3g} bytes per token)"


def scaled(values_P: Array, units: Mapping[str, float], role: str) -> Array:
    """The column in parameters, tokens, FLOPs or nats."""
    return values_P * units.get(role, 1.0)
