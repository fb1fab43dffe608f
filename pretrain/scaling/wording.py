"""Numbers in words, everywhere alike: what was estimated has fixed digits, what was asked for or counted is short."""

from __future__ import annotations

import math
from collections.abc import Callable

from pretrain.scaling.lines import Interval
from pretrain.terminal.text import prefixed, si

LOSS_DECIMALS = 4
ERRORS = "errors are predicted minus measured (+: too much was predicted)"


def amount(value: float) -> str:
    """Parameters or tokens as they were asked for or counted: `10M`, `2.2G`."""
    return si(value).replace(" ", "")


def size(value: float) -> str:
    """Estimated parameters or tokens: `10.0M`, `2.20G`, `-` for none."""
    if not math.isfinite(value):
        return "-"
    number, prefix = prefixed(value)
    return f"{number:#.3g}".rstrip(".") + prefix


def flops(value: float) -> str:
    """Estimated FLOPs: `7.20e+11`."""
    return f"{value:.2e}" if math.isfinite(value) else "-"


def loss(value: float) -> str:
    """A loss in nats per token: `1.6640`."""
    return f"{value:.{LOSS_DECIMALS}f}" if math.isfinite(value) else "-"


def power(value: float) -> str:
    """An exponent: `0.466`."""
    return f"{value:.3f}" if math.isfinite(value) else "-"


def factor(value: float) -> str:
    """A constant of the law: `1606`."""
    return f"{value:.4g}" if math.isfinite(value) else "-"


def shown(interval: Interval, text: Callable[[float], str]) -> str:
    """An interval as `value [low, high]`, each end as `text` writes it."""
    return f"{text(interval.value)} [{text(interval.low)}, {text(interval.high)}]"
