"""What `describe` says a GPU needs, against all tensors alive in a pass on torch's meta device."""

from typing import Any

import pytest

from benchmarks.meta import meta_as_gpu, model_on_meta, trained_on_meta
from benchmarks.static import GIB, runs
from foundation.settings import parse_config
from foundation.typed_values import to_tree
from pretrain.config.run import RunConfig, lanes_of_rank
from pretrain.costs.device_memory import Footprint, lane_bytes
from pretrain.costs.flops import parameter_counts, pass_lanes
from tests.helpers.live_tensors import LiveTensors

FULL = {"activation_checkpointing": "full"}
WORDY = {"vocab_size": 128_256}
# The model of configs/models, ranks, and settings of the model and of the engine.
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "zero 1": ("xl_modern_1b", 64, {}, {"zero_stage": 1}),
    "zero 2": ("xl_modern_1b", 64, {}, {}),
    "zero 3": ("xl_modern_1b", 64, {}, {"zero_stage": 3}),
    "zero 1, checkpointed": ("xl_modern_1b", 64, {}, {"zero_stage": 1, **FULL}),
    "zero 2, checkpointed": ("xl_modern_1b", 64, {}, FULL),
    "zero 3, checkpointed": ("xl_modern_1b", 64, {}, {"zero_stage": 3, **FULL}),
    "many words": ("xl_modern_1b", 64, WORDY, FULL),
    "many words, 16 of 64 lanes": ("xl_modern_1b", 8, WORDY, {"micro_batch_lanes": 16, **FULL}),
    "7b, a lane": ("xl_modern_7b", 64, {}, {"micro_batch_lanes": 1}),
    "no z-loss": ("xl_modern_1b", 64, {"z_loss": 0.0}, {}),
    "logits in chunks": ("xl_modern_1b", 64, {}, {"logits_chunk_tokens": 1024}),
    "relative positions": ("xl_modern_1b", 64, {"positions": "relative"}, {}),
    "layernorm, gelu": ("xl_modern_1b", 64, {"norm": "layernorm", "feed_forward": "gelu"}, {}),
}


def run_of(name: str) -> tuple[RunConfig, int]:
    model, ranks, of_model, of_engine = CASES[name]
    tree = to_tree(runs()[model])
    tree["model"] |= of_model
    tree["engine"] |= {"precision": "bf16", **of_engine}
    return parse_config(RunConfig, tree, name), ranks


def peak_of_a_pass(run: RunConfig, ranks: int) -> float:
    """Return what is alive besides the weights; from stage 2 on no whole gradient stays."""
    engine = run.engine
    with meta_as_gpu(), LiveTensors(None, on_meta=True) as live:
        module = model_on_meta(
            run.model,
            activation_checkpointing=engine.activation_checkpointing,
            logits_chunk_tokens=engine.logits_chunk_tokens,
        )
        for parameter in module.parameters() if engine.zero_stage > 1 else ():
            parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
        for _ in trained_on_meta(module, run.data.segment_length, pass_lanes(run, ranks)):
            pass
    waiting = len(lanes_of_rank(run, 0, ranks)) - pass_lanes(run, ranks)
    return live.peak - 2 * parameter_counts(run.model).total + 2 * waiting * lane_bytes(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_for_a_gpu_is_within_5_per_cent_of_the_tensors_alive(name: str) -> None:
    run, ranks = run_of(name)
    footprint = Footprint(run, ranks, on_gpu=True)
    parts, P = footprint.parts, parameter_counts(run.model).total
    expected = parts["weights"] + parts["optimizer"] + peak_of_a_pass(run, ranks)
    if run.engine.zero_stage == 1:  # in float32; they are copied when activations are gone
        carried = parts["weights"] + parts["optimizer"] + parts["recurrent memory"]
        expected = max(expected + 4 * P, carried + 8 * P)
    else:
        expected += parts["gradients"] + parts["gradient buckets"]
    assert footprint.device / GIB == pytest.approx(expected / GIB, rel=0.05)
