"""Parts of a model alone: a Gated DeltaNet, evaluation in two precisions, NVIDIA's step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.findings import Context, wait_for
from benchmarks.gpu.training import measured_run
from benchmarks.peer_sides import Case, OurSide, nvidia_side
from pretrain.kernels.flash_linear_attention import missing_package
from pretrain.mixers.deltanet.facts import widths_of
from pretrain.mixers.deltanet.module import GatedDeltaNet
from pretrain.model.cached import new_stream
from pretrain.model.transformer_xl import TransformerXL

# NVIDIA's wt103_base.yaml, with the tokens of one of its eight GPUs, and a whole softmax.
NVIDIA_MODEL: dict[str, Any] = {
    "n_token": 32_000, "n_layer": 16, "n_head": 8, "d_model": 512, "d_head": 64, "d_inner": 2048,
    "d_embed": 512, "mem_len": 192, "pre_lnorm": False, "same_length": False, "clamp_len": -1,
    "tie_weight": True, "cutoffs": [], "div_val": 1, "tie_projs": [False],
}  # fmt: skip
NVIDIA_CASE = Case("wt103 base", NVIDIA_MODEL, segment_length=192, lanes=32, dropout=0.1)
TOY_SIZES = {"n_token": 64, "n_layer": 2, "n_head": 2, "d_model": 32, "d_head": 16, "d_inner": 64,
             "d_embed": 32, "mem_len": 8}  # fmt: skip


def deltanet(context: Context) -> None:
    """Time the layer that a hybrid of xl_modern_1b has, with each kernel that there is."""
    run, device = measured_run("xl_modern_1b hybrid", context), context.device
    B, L, N = run.data.lanes, run.data.segment_length, run.model.num_heads
    segment_BLD = torch.randn(B, L, run.model.d_model, device=device, dtype=context.dtype)
    state_BNHX = torch.zeros(B, N, run.model.head_width, widths_of(run.model, "deltanet").value)
    segment_BLD.requires_grad_()
    for name in ("ours", "fla"):
        missing = missing_package()
        if name == "fla" and (missing or context.is_dry):
            context.add(name, note=missing or "fla needs a GPU")
            continue
        layer = GatedDeltaNet(run.model, 0, "plain" if name == "ours" else "auto")
        layer.to(device, context.dtype)
        tail_BXY = torch.zeros(B, 3, layer.convolution_weight.shape[-1], dtype=context.dtype)
        carried = state_BNHX.to(device), tail_BXY.to(device)

        def step(layer: GatedDeltaNet = layer, carried: tuple[Tensor, Tensor] = carried) -> None:
            layer(segment_BLD, *carried, None)[0].sum().backward()

        context.add(name, ms=1e3 * _seconds(step, context), lanes=B, tokens=L)


def evaluation(context: Context) -> None:
    """Measure the tokens that a trained model scores in a second."""
    run = measured_run("xl_modern_1b", context)
    module = TransformerXL(run.model).to(context.device)
    shape = (run.data.lanes, run.data.segment_length)
    tokens_BL = torch.randint(run.model.vocab_size, shape, device=context.device)
    for dtype in (torch.bfloat16, torch.float32):
        stream = new_stream(module.to(dtype), run.model.longest_memory, shape[1])
        seconds = _seconds(lambda stream=stream: stream.nll_BL(tokens_BL, tokens_BL), context)
        context.add(str(dtype), tokens_per_second=tokens_BL.numel() / seconds)


def nvidia(context: Context) -> None:
    """Time a training step of NVIDIA's code and of ours with the same weights, in turns."""
    case = replace(NVIDIA_CASE, dtype=str(context.dtype).removeprefix("torch."))
    case = replace(case, device=context.device.type)
    if context.is_dry:
        case = replace(case, model={**NVIDIA_MODEL, **TOY_SIZES}, segment_length=8, lanes=2)
    theirs, ours = nvidia_side(context.nvidia)[0], OurSide()
    theirs.load(case, None)
    ours.load(case, theirs.weights())
    shape = (case.lanes, case.segment_length + 1)
    tokens_BT = torch.randint(case.model["n_token"], shape, device=context.device)
    batch = tokens_BT[:, :-1], tokens_BT[:, 1:]
    for name, side in {"NVIDIA": theirs, "ours": ours}.items():
        losses = [float(side.train(*batch)) for _ in range(3)]
        seconds = _seconds(lambda side=side: side.train(*batch), context)
        rate = batch[0].numel() / seconds
        context.add(name, ms=1e3 * seconds, tokens_per_second=rate, losses=losses)


def _seconds(work: Callable[[], Any], context: Context) -> float:
    """Return the median time of a call, after a few that compile kernels and fill the memory."""
    seconds = []
    for _ in range(context.size(13, 2)):
        start = time.perf_counter()
        work()
        wait_for(context.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[context.size(3, 1) :])
