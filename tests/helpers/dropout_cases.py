"""The kernel of dropout against the CPU, bit by bit; as a module it prints JSON.

It runs in triton's interpreter, or on a GPU.
"""

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.model.dropout import LEVELS, DropoutStream, Site
from tests.helpers.triton_interpreter import prepare_interpreter

LANES = [7, -1, 1 << 40]  # -1 is the mask that all lanes share


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: tuple[int, ...]
    lane_axis: int = 0
    rate: float = 0.3
    seed: int = 3
    dtype: torch.dtype = torch.float32
    is_transposed: bool = False


CASES = {
    "two programs": Case(shape=(2, 3000)),
    "odd sizes": Case(shape=(3, 37, 41)),
    "lanes on the second axis": Case(shape=(2, 3, 19, 23), lane_axis=1),
    "float64": Case(shape=(3, 50), dtype=torch.float64),
    "float16, a large seed": Case(shape=(1, 100), dtype=torch.float16, seed=(1 << 64) - 2),
    "a rate that is no power of two": Case(shape=(1, 64), rate=0.1),
    "nearly all": Case(shape=(1, 500), rate=1.0),
    "not dense": Case(shape=(3, 20, 30), is_transposed=True),
    "no values": Case(shape=(2, 0)),
}


def differences_of(case: Case, device: torch.device) -> dict[str, int]:
    """Return how many outputs and gradients differ in any bit."""
    generator = torch.Generator().manual_seed(1)
    values, gradients = torch.randn(2, *case.shape, generator=generator).to(case.dtype)
    if case.is_transposed:
        values, gradients = (each.mT.contiguous().mT for each in (values, gradients))
    stream = DropoutStream(case.seed, 5, LANES[: case.shape[case.lane_axis]])
    expected = _both(values, gradients, lambda x: _on_cpu(stream, x, case))
    found = _both(values.to(device), gradients.to(device), lambda x: _by_kernel(stream, x, case))
    return {
        name: int((a.cpu().view(torch.uint8) != b.view(torch.uint8)).sum())
        for name, a, b in zip(("output", "gradient"), found, expected, strict=True)
    }


def _both(values: Tensor, gradients: Tensor, dropping) -> tuple[Tensor, Tensor]:
    values = values.detach().requires_grad_()
    output = dropping(values)
    output.backward(gradients)
    assert values.grad is not None
    return output.detach().contiguous(), values.grad.contiguous()


def _on_cpu(stream: DropoutStream, values: Tensor, case: Case) -> Tensor:
    return stream.drop(values, case.rate, Site.FINAL, layer=2, lane_axis=case.lane_axis)


def _by_kernel(stream: DropoutStream, values: Tensor, case: Case) -> Tensor:
    if values.is_cuda:  # the model's own way
        return _on_cpu(stream, values, case)
    from pretrain.kernels.triton.dropout import Mask, dropped

    threshold = min(round(case.rate * LEVELS), LEVELS - 1)
    numbers = (stream.seed, stream.step, 2, int(Site.FINAL))
    lanes_B = torch.tensor(stream.lanes)
    return dropped(values, Mask(lanes_B, numbers, threshold, case.lane_axis))


if __name__ == "__main__":
    prepare_interpreter()
    cpu = torch.device("cpu")
    print(json.dumps({name: differences_of(case, cpu) for name, case in CASES.items()}))
