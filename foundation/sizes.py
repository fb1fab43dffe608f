"""Sizes and counts as people write them: 4k lanes, 10M parameters, 2GiB."""

import argparse
import re
from collections.abc import Callable
from fractions import Fraction

BYTES = "bytes"
_MEASURES = ("seconds", "hours", "GiB", "MiB per second")  # all other units are counted
_COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_DECIMAL = {name: factor for name, factor in _COUNTS.items() if name != "B"}
_OF_BYTES = {
    f"{name}{end}": factor for name, factor in (_DECIMAL | _BINARY).items() for end in ("", "B")
}
_OF_COUNTS = {**_COUNTS, **_BINARY}
_LONGEST = 40  # characters of a number; Python refuses integers of thousands of digits
_LIKE_A_SIZE = re.compile(r"\d[\d_.,]{0,40}\s?[A-Za-z]{1,20}")
_SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\d{1,2})?)\s?([A-Za-z]*)", re.ASCII)


def parse_size(text: str, unit: str) -> int | float | None:
    """Return the number that `text` stands for, or None if it is not a number with a prefix.

    k or K, M, B or G, and T are powers of 1,000; Ki, Mi, Gi and Ti of 1,024. Where the unit is
    bytes, B stands for them: `2GB`, `2GiB`. An exponent may be there: `1e9`.
    """
    match = _SIZE.fullmatch(text.strip())
    factors = _OF_BYTES if unit == BYTES else _OF_COUNTS
    if not match or match[2] not in factors or len(match[1]) > _LONGEST:
        return None
    value = Fraction(match[1].replace("_", "")) * factors[match[2]]
    return int(value) if value.denominator == 1 else float(value)


def size_example(unit: str) -> str:
    """Return examples of numbers of the unit, for an error message."""
    if unit == BYTES:
        return "8MiB or 2GB (kB, MB, GB, TB are powers of 1,000; KiB, MiB, GiB, TiB of 1,024)"
    if unit in _MEASURES:
        return "20, without a unit"
    return "4k or 10M (k, M, B or G, T are powers of 1,000; Ki, Mi, Gi, Ti of 1,024)"


def is_like_size(value: object, unit: str) -> bool:
    """Whether the value, where a number of `unit` is expected, is a text such as `10x`."""
    return bool(unit) and isinstance(value, str) and bool(_LIKE_A_SIZE.fullmatch(value.strip()))


def size_of(unit: str) -> Callable[[str], int]:
    """Return the `type` of a flag whose value is a whole number of `unit`."""

    def parse(text: str) -> int:
        value = parse_size(text.removeprefix("-"), unit)
        if not isinstance(value, int):
            raise _not_a_size(text, unit)
        return -value if text.startswith("-") else value  # the command checks the range

    return parse


def amount_of(unit: str) -> Callable[[str], float]:
    """Return the `type` of a flag whose value may also be written as 1e9."""

    def parse(text: str) -> float:
        value = parse_size(text, unit)
        try:
            return float(text if value is None else value)
        except ValueError:
            raise _not_a_size(text, unit) from None

    return parse


def _not_a_size(text: str, unit: str) -> argparse.ArgumentTypeError:
    example = size_example(unit)
    return argparse.ArgumentTypeError(
        f"found {text!r}, expected a number of {unit}, such as {example}"
    )
