"""The fused kernels of every option against float64, and their bits a second time."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu.attention import (
    AttentionInputs,
    Shape,
    errors,
    output_and_gradients,
    path_of,
)
from benchmarks.gpu.context import Context

CHECKED = Shape(B=2, L=200, M=150, N=4, H=64)
CASES = {
    "width 64": CHECKED,
    "width 128": replace(CHECKED, H=128),
    "width 80": replace(CHECKED, H=80),
    "width 41": replace(CHECKED, H=41),
    "no memory": replace(CHECKED, M=0),
    "one query": replace(CHECKED, L=1, H=128),
    "dropout": replace(CHECKED, dropout=0.1, H=128),
    "documents": replace(CHECKED, num_documents=5, H=128),
    "window": replace(CHECKED, window=100, H=128),
    "grouped queries": replace(CHECKED, G=2, H=128),
    "distance bias": replace(CHECKED, adds_distance_bias=True),
    "everything": replace(CHECKED, H=128, G=2, window=100, num_documents=3, dropout=0.1),
    "long": Shape(B=2, L=2048, M=2048, N=4, H=128),
}
DRY_CASES = {
    name: replace(case, L=min(case.L, 12), M=min(case.M, 7), H=16, window=min(case.window, 6))
    for name, case in CASES.items()
    if case.H == CHECKED.H or case.dropout  # other widths are other code on a GPU only
}


def run(context: Context) -> None:
    """Check the error and the repeated bits of every case and precision."""
    dtypes = context.size((torch.bfloat16, torch.float16), (torch.float32,))
    for name, shape in context.size(CASES, DRY_CASES).items():
        for dtype in dtypes:
            found = errors(shape, context.device, dtype)
            passed = all(each["passed"] for each in found.values())
            repeats = repeats_its_bits(shape, context.device, dtype)
            words = {"repeats": repeats, **found}
            context.report.check(f"{name}, {dtype}", passed and repeats, **words)


def repeats_its_bits(shape: Shape, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether output and gradients are bitwise equal when computed twice."""
    path = path_of(shape, device, dtype)
    inputs = AttentionInputs(shape, device, dtype)
    first, second = (output_and_gradients(inputs, path) for _ in range(2))
    return all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
