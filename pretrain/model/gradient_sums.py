"""Gradients of parameters that several parts of one forward pass use, summed in float32.

Where many chunks use a bf16 parameter, autograd adds each chunk's gradient to a sum in bf16. That
sum is soon so much larger than what is added that most of it is rounded away: the error grows with
the number of chunks. Summed in float32, it is rounded once, at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GradientSums:
    """The sums of one forward pass, whose every part uses each of the parameters once."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._totals: dict[Tensor, _Total] = {}

    def shared(self, parameter: Tensor) -> Tensor:
        """Return the parameter for one part; its gradient arrives when all parts have theirs."""
        if self._num_parts == 1 or torch.finfo(parameter.dtype).bits >= 32:
            return parameter
        total = self._totals.setdefault(parameter, _Total(self._num_parts))
        shared = _Shared.apply(parameter, total)
        assert isinstance(shared, Tensor)
        return shared


class _Total:
    """The sum of the gradients so far, and how many are missing."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = self._missing = num_parts
        self._sum: Tensor | None = None

    def plus(self, gradient: Tensor) -> Tensor | None:
        """Add a gradient; the sum if it was the last, else None, which autograd adds to nothing."""
        self._sum = gradient.float() if self._sum is None else self._sum.add_(gradient)
        self._missing -= 1
        if self._missing:
            return None
        complete, self._sum, self._missing = self._sum, None, self._num_parts
        return complete.to(gradient.dtype)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: _Total) -> Tensor:  # type: ignore[override]
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.total.plus(gradient), None
