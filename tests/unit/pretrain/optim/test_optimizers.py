"""What an update does: optimizers, groups, rates, norms, scale, skipped steps and EMA.

Under ZeRO they are compared with plain torch in tests/integration/test_optimizers.py.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pretrain.checkpoint.load import load_memory
from pretrain.checkpoint.verify import latest_valid
from pretrain.config.model import OptimizerName, ScheduleShape
from pretrain.config.resolve import resolve
from pretrain.config.run import (
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    MetricsConfig,
    OptimConfig,
    RecoveryConfig,
    RunConfig,
    ScheduleConfig,
)
from pretrain.costs.flops import moment_bytes, orthogonalizing_flops
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine
from pretrain.engines.torch_engine import TorchEngine
from pretrain.errors import TrainingError
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.loss_scale import LossScaler
from pretrain.optim.muon import orthogonalized, owners
from pretrain.optim.optimizers import build_optimizer
from pretrain.optim.parameter_groups import (
    decays,
    layer_metrics,
    layer_name,
    parameter_role,
    set_learning_rate,
)
from pretrain.optim.schedule import learning_rate_at
from pretrain.run import build_engine, run_training
from pretrain.rundir.run_dir import RunDir
from tests.helpers.choices import MODEL_CHOICES
from tests.helpers.models import TINY, VARIANTS, tiny_model
from tests.helpers.tiny_runs import ALONE, tiny_run, training_stream

STEPS, RATE, DECAY = 10, 0.02, 0.1
VARIED = replace(  # tall, wide and stacked matrices; projections and tables that Muon leaves alone
    TINY, num_key_heads=1, feed_forward="swiglu", d_inner=40, cutoffs=(20,), div_val=2
)


def gradients_of(module: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(each.shape, generator=generator) / (1 + step)
        for name, each in module.named_parameters()
    }


def is_decayed(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and not name.endswith(("content_bias", "position_bias"))


def torch_optimizers(
    module: TransformerXL, optim: OptimConfig
) -> tuple[dict[str, list[nn.Parameter]], list[torch.optim.Optimizer]]:
    """torch's Muon with a parameter for each single matrix, and its AdamW for everything else."""
    parts = {
        name: [
            nn.Parameter(part.clone())
            for part in each.detach().chunk(2 if name.endswith(".key_value_weight") else 1)
        ]
        for name, each in module.named_parameters()
    }
    roles = {name: parameter_role(name, module.config) for name in parts}
    matrices = [part for name in parts if roles[name] == "matrix" for part in parts[name]]
    others = [
        {"params": parts[name], "weight_decay": DECAY if is_decayed(name, parts[name][0]) else 0.0}
        for name in parts
        if roles[name] != "matrix"
    ]
    rate = {"lr": optim.learning_rate, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, weight_decay=DECAY, **rate)
    adamw = torch.optim.AdamW(others, lr=optim.learning_rate, betas=optim.betas, fused=True)
    return parts, [muon, adamw]


def test_ten_steps_in_bf16_are_bit_for_bit_those_of_torch() -> None:
    torch.manual_seed(3)
    optim = OptimConfig(name="muon", learning_rate=RATE, weight_decay=DECAY, clip_norm=0.0)
    module = TransformerXL(VARIED)
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    parts, references = torch_optimizers(module, optim)
    run = RunConfig(model=VARIED, optim=optim, engine=EngineConfig(kind="torch", precision="bf16"))
    engine = TorchEngine(run, module, ALONE, accumulation_steps=1)
    for step in range(STEPS):
        for name, gradient in gradients_of(module, step).items():
            module.get_parameter(name).grad = gradient.clone()
            for part, of_part in zip(parts[name], gradient.chunk(len(parts[name])), strict=True):
                part.grad = of_part.clone()
        engine.step(RATE)
        for reference in references:
            reference.step()
    for name, after in module.named_parameters():
        assert torch.equal(after.detach(), torch.cat([each.detach() for each in parts[name]])), name
        assert not torch.equal(after, before[name])


def textbook_lamb(
    weight: Tensor, gradients: list[Tensor], optim: OptimConfig, is_matrix: bool
) -> Tensor:
    """Algorithm 2 of the paper with phi(z) = z, in float64; vectors by Adam alone."""
    weight, average, square = weight.double(), torch.zeros(()).double(), torch.zeros(()).double()
    (first, second), decay = optim.betas, DECAY * is_matrix
    for number, gradient in enumerate(gradients, start=1):
        average = first * average + (1 - first) * gradient.double()
        square = second * square + (1 - second) * gradient.double() ** 2
        root = (square / (1 - second**number)).sqrt() + optim.epsilon
        update = average / (1 - first**number) / root + decay * weight
        trust = weight.norm() / update.norm() if is_matrix and weight.any() else 1.0
        weight = weight - RATE * trust * update
    return weight


def test_ten_steps_of_lamb_agree_with_the_algorithm_as_printed() -> None:
    torch.manual_seed(3)
    optim = OptimConfig(name="lamb", learning_rate=RATE, weight_decay=DECAY, clip_norm=0.0)
    module = TransformerXL(VARIED)
    with torch.no_grad():  # a norm of 0 leaves the ratio at 1
        module.get_parameter("layers.0.attention.query_weight").zero_()
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    run = RunConfig(model=VARIED, optim=optim, engine=EngineConfig(kind="torch", precision="fp32"))
    engine = TorchEngine(run, module, ALONE, accumulation_steps=1)
    steps = [gradients_of(module, step) for step in range(STEPS)]
    for gradients in steps:
        for name, gradient in gradients.items():
            module.get_parameter(name).grad = gradient.clone()
        engine.step(RATE)
    for name, after in module.named_parameters():
        is_matrix = is_decayed(name, after)
        gradients = [each[name] for each in steps]
        expected = textbook_lamb(before[name], gradients, optim, is_matrix)
        torch.testing.assert_close(after.double(), expected, rtol=0, atol=1e-5)
        assert (expected - before[name]).abs().max() > 1e-3


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (1, 7)], ids=str)
def test_in_fp32_the_iteration_is_the_published_one(shape: tuple[int, int]) -> None:
    """Its polynomial applied to the singular values, in float64."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ values.diag() @ right
    torch.testing.assert_close(orthogonalized(matrix).double(), expected, rtol=0, atol=1e-5)
    assert not orthogonalized(torch.zeros(shape)).any()  # not NaN


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_run(tmp_path_factory.mktemp("run"), OptimConfig(clip_norm=0.05))


OTHERS = {"compressed_length": 2}, {"num_key_heads": 1}, {"layer_kinds": ("deltanet", "attention")}


@pytest.mark.parametrize("options", [{}, *OTHERS], ids=str)
def test_flops_and_state_are_those_of_an_update(run, world, options):
    model = replace(run.model, feed_forward="swiglu", **options)
    run = replace(run, model=model, optim=OptimConfig(name="muon"))
    engine = build_engine(run, world)
    batch = next(training_stream(run))
    engine.forward_backward(batch, None, 0)
    with FlopCounterMode(display=False) as counter:
        engine.step(RATE)
    assert orthogonalizing_flops(run.model, run.optim) == counter.get_total_flops()
    values = [each.values for each in engine.fragments()]
    elements = sum(each[kind].numel() for each in values for kind in each.keys() - {"weight"})
    parameters = sum(each["weight"].numel() for each in values)
    assert moment_bytes(run.model, run.optim) == 4 * elements < 8 * parameters


def test_gradients_are_clipped_before_the_moments_see_them(run: RunConfig, world: World) -> None:
    run = replace(run, optim=OptimConfig(name="lamb", clip_norm=0.05))
    engine = build_engine(run, world)
    engine.forward_backward(next(training_stream(run)), None, 0)
    grad_norm = engine.step(RATE).grad_norm
    assert float(grad_norm) > 2 * run.optim.clip_norm
    exp_avgs = torch.cat([fragment.values["exp_avg"] for fragment in engine.fragments()])
    torch.testing.assert_close(exp_avgs.norm().item(), 0.1 * run.optim.clip_norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("costs", "ranks", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0], 2, [0, 1, 0, 1, 0]),
        ([1.0, 1.0, 4.0, 2.0], 2, [1, 1, 0, 1]),  # the large one alone
        ([3.0], 4, [0]),
    ],
)
def test_owners_have_about_the_same_work(costs, ranks, expected):
    assert owners(costs, ranks) == expected


LAYERS = {"shared", "embedding", "layer.0", "layer.1", "output"}


@pytest.mark.parametrize(
    ("name", "clip_norm"), list(zip(get_args(OptimizerName), cycle([0.05, 0.0])))
)
def test_norms_and_ratios_equal_those_of_gradients_and_weights(run, world, name, clip_norm):
    run = replace(run, optim=OptimConfig(name=name, weight_decay=0.1, clip_norm=clip_norm))  # type: ignore[arg-type]
    engine, memory = build_engine(run, world), None
    stream = training_stream(run)
    for step in range(4):
        _, memory = engine.forward_backward(next(stream), memory, step)
        before = {key: each.detach().clone() for key, each in engine.module.named_parameters()}
        gradients = {key: each.grad.clone() for key, each in engine.module.named_parameters()}
        result = engine.step(RATE, measure_layers=step == 3)
    layers, norm = result.layers, float(result.grad_norm)
    squares = layers.squares_KG.flatten().tolist()
    found = layer_metrics(layers.names, squares, norm, clip_norm)
    after = dict(engine.module.named_parameters())
    assert {key.split("/")[1] for key in found} == LAYERS
    for layer in LAYERS:
        keys = [key for key in after if layer_name(key) == layer]
        expected = norm_of([gradients[key] for key in keys])
        assert found[f"grad_norm/{layer}"] == pytest.approx(expected, rel=1e-5)
        moved = norm_of([after[key].detach() - before[key] for key in keys])
        ratio = moved / norm_of([after[key].detach() for key in keys])
        assert found[f"update_ratio/{layer}"] == pytest.approx(ratio, rel=1e-4)
    whole = math.sqrt(sum(found[f"grad_norm/{layer}"] ** 2 for layer in LAYERS))
    assert whole == pytest.approx(norm, rel=1e-5)


def norm_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().view(-1) for tensor in tensors]).norm())


def test_measuring_changes_no_bit_and_only_requested_steps_are_measured(run, world):
    ends = []
    for asked in (False, True):
        engine, memory = build_engine(run, world), None
        stream = training_stream(run)
        for step in range(3):
            _, memory = engine.forward_backward(next(stream), memory, step)
            assert (engine.step(RATE, measure_layers=asked).layers is not None) == asked
        ends.append({fragment.name: fragment.values for fragment in engine.fragments()})
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_a_run_logs_norms_at_the_end_of_each_interval(run, world, tmp_path):
    run = replace(
        run,
        optim=OptimConfig(steps=6, clip_norm=0.05),
        metrics=MetricsConfig(interval=2, tensorboard=False),
        checkpoint=CheckpointConfig(interval=3),  # cuts an interval in two
        evaluation=EvaluationConfig(interval=0, max_tokens=200),
    )
    assert run_training(resolve(run), tmp_path / "run", world) == 0
    lines = [line for line in RunDir(tmp_path / "run").read_metrics() if "grad_norm/output" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    for line in lines:
        assert all(0 < line[f"update_ratio/{layer}"] < 1 for layer in LAYERS - {"shared", "output"})


def built_variants() -> Iterator[TransformerXL]:
    """The tests' variants, and every name of every choice, with and without compressed rows."""
    for options in VARIANTS.values():
        yield TransformerXL(replace(TINY, **options))
    for name, value in MODEL_CHOICES:
        yield TransformerXL(replace(TINY, compressed_length=2, **{name: value}))


def test_every_parameter_of_every_variant_has_one_role() -> None:
    for module in built_variants():
        for name, parameter in module.named_parameters():
            role = parameter_role(name, module.config)
            # Under ZeRO-3 a parameter has no shape, so the name alone must tell.
            biases = ("content_bias", "position_bias", "bucket_bias")
            is_pair = name.endswith((*biases, "mamba2.skip"))
            assert (parameter.dim() == 2) == (decays(role) or is_pair), (name, role)


@pytest.mark.parametrize("name", ["layers.0.attention.sink", "head.bins.0.gate", "bias"])
def test_a_parameter_without_a_role_is_an_error(name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        parameter_role(name, TINY)


def test_a_bin_that_no_token_is_in_takes_adams_step_for_a_gradient_of_zero() -> None:
    model = tiny_model(cutoffs=(9, 20), tie_embeddings=False)
    optim = OptimConfig(learning_rate=0.01, weight_decay=0.1)
    optimizer = build_optimizer(model, optim)
    set_learning_rate(optimizer.param_groups, optim.learning_rate)
    unused, gradients, before = model.head.bins[2].weight, [], []
    for first, last in ((20, 37), (0, 9)):
        tokens_BL = torch.arange(first, last)[None]
        model(tokens_BL, tokens_BL)[0].mean().backward()
        gradients.append(unused.grad)
        before.append(unused.detach().clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert gradients[0].abs().max() > 0
    assert torch.equal(gradients[1], torch.zeros_like(unused))
    first_moment = 0.9 * 0.1 * gradients[0] / (1 - 0.9**2)
    second_moment = 0.999 * 0.001 * gradients[0].square() / (1 - 0.999**2)
    update = first_moment / (second_moment.sqrt() + optim.epsilon) + 0.1 * before[1]
    torch.testing.assert_close(unused.detach(), before[1] - 0.01 * update, rtol=1e-9, atol=1e-12)


def step_of(scaler: LossScaler, grad_norm: float, loss: float = 2.0, applied: bool = True) -> bool:
    scaler.observe(torch.tensor(loss))
    return scaler.update(grad_norm, applied)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("scale", "window", "norms", "scales"),
    [
        (64.0, 3, [math.inf, 1, 1, 1], [32, 32, 32, 64]),
        (64.0, 3, [1, 1, math.nan, 1, 1], [64, 64, 32, 32, 32]),  # the count starts again
        (2.0, 3, [math.inf, math.inf], [1, 1]),  # at the smallest scale it is no overflow
    ],
)
def test_the_scale_halves_on_overflow_and_doubles_after_a_window(scale, window, norms, scales):
    scaler = LossScaler(scale, window)
    for norm, after in zip(norms, scales, strict=True):
        before = scaler.scale
        assert step_of(scaler, norm) == (after < before)
        assert scaler.scale == after


@pytest.mark.usefixtures("world")
def test_neither_updates_that_were_not_applied_nor_those_of_a_nan_loss_count():
    scaler = LossScaler(64.0, window=1)
    assert not step_of(scaler, 1e9, applied=False)
    assert not step_of(scaler, math.inf, loss=math.nan)
    assert scaler.scale == 64.0
    assert step_of(scaler, math.inf)  # the loss before is forgotten


@pytest.mark.usefixtures("world")
def test_the_count_survives_a_checkpoint_and_ends_at_a_window_lowered_meanwhile():
    scaler = LossScaler(64.0, window=5)
    for _ in range(4):
        step_of(scaler, 1.0)
    for window, scales in ((5, [128.0] * 3), (2, [128.0, 128.0, 256.0])):
        resumed = LossScaler(2.0, window)
        resumed.restore(scaler.to_tree())
        assert [(step_of(resumed, 1.0), resumed.scale)[1] for _ in scales] == scales


@pytest.mark.parametrize("name", get_args(OptimizerName))
@pytest.mark.parametrize(("clip_norm", "limit"), [(0.05, 1e-9), (OptimConfig().clip_norm, 0.0)])
def test_a_step_beyond_the_limit_or_with_nan_changes_nothing(run, name, clip_norm, limit):
    optim = OptimConfig(name=name, clip_norm=clip_norm)
    run = replace(run, optim=optim, recovery=RecoveryConfig(skip_grad_norm=limit))
    engine = build_engine(run, ALONE)
    before = {each.name: each.values["weight"].clone() for each in engine.fragments()}
    engine.forward_backward(next(training_stream(run)), None, 0)
    if not limit:
        for parameter in engine.module.parameters():
            parameter.grad.fill_(math.nan)
    assert engine.step(learning_rate=0.02).skipped
    assert engine.optimizer_step_count() == 0
    for fragment in engine.fragments():
        assert torch.equal(fragment.values["weight"], before[fragment.name])
        assert not any(fragment.values[kind].any() for kind in fragment.values.keys() - {"weight"})


EMA_DECAY, EMA = 0.75, "ema"


def parameters_of(engine: Engine) -> dict[str, Tensor]:
    named = engine.module.named_parameters()
    return {name: parameter.detach().clone().view(-1) for name, parameter in named}


def test_the_ema_weighs_older_weights_by_its_decay_and_affects_no_training(run, world):
    """It takes no skipped step, and starts anew from loaded weights."""
    with_ema, plain = (
        build_engine(replace(run, optim=OptimConfig(ema_decay=decay)), world)
        for decay in (EMA_DECAY, 0.0)
    )
    expected = parameters_of(with_ema)

    def check_ema() -> None:
        for fragment in with_ema.fragments():
            ema, weight = fragment.values[EMA], fragment.values["weight"]
            torch.testing.assert_close(ema, expected[fragment.name], rtol=0, atol=1e-6)
            assert not torch.equal(ema, weight)

    for engine in (with_ema, plain):
        stream, memory = training_stream(run), None
        for step in range(4):
            _, memory = engine.forward_backward(next(stream), memory, step)
            engine.step(RATE)
            if engine is with_ema:
                weights = parameters_of(engine)
                expected = {
                    k: EMA_DECAY * expected[k] + (1 - EMA_DECAY) * weights[k] for k in weights
                }
    check_ema()  # a skipped step could hide that it is one update late
    weights, of_plain = parameters_of(with_ema), parameters_of(plain)
    assert all(torch.equal(weights[name], of_plain[name]) for name in weights)
    with_ema.forward_backward(next(stream), memory, 4)
    next(with_ema.module.parameters()).grad.fill_(math.inf)
    assert with_ema.step(RATE).skipped
    check_ema()
    with_ema.after_load(0)
    for fragment in with_ema.fragments():
        assert torch.equal(fragment.values[EMA], fragment.values["weight"])


@pytest.mark.parametrize("limit", [1e-9, 0.0])
def test_what_a_skipped_step_read_is_not_remembered(run, world, tmp_path, limit):
    run = replace(
        run,
        optim=OptimConfig(steps=2),
        recovery=RecoveryConfig(skip_grad_norm=limit, spike_threshold=0.0),
        metrics=MetricsConfig(tensorboard=False),
        evaluation=EvaluationConfig(interval=0, max_tokens=100),
    )
    with pytest.raises(TrainingError) if limit else contextlib.nullcontext():
        run_training(resolve(run), tmp_path / "run", world)
    found = latest_valid(RunDir(tmp_path / "run").checkpoints, pytest.fail)
    assert (load_memory(found, range(run.data.lanes)) is None) == (limit > 0.0)


def optim(shape: str, **settings: float) -> OptimConfig:
    schedule = ScheduleConfig(shape=shape, warmup_steps=10, **settings)  # type: ignore[arg-type]
    return OptimConfig(steps=100, learning_rate=2.0, schedule=schedule)


@pytest.mark.parametrize("shape", get_args(ScheduleShape))
def test_warmup_rises_linearly_to_the_peak_and_no_later_rate_rises(shape):
    rates = [learning_rate_at(optim(shape), step) for step in range(100)]
    assert rates[:10] == pytest.approx([2.0 * part / 10 for part in range(1, 11)])
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rates[9:]))


def test_the_cosine_from_the_start_is_that_of_torch_over_the_whole_run() -> None:
    settings = optim("cosine_from_start", final_fraction=0.1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([parameter], lr=2.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 100, eta_min=0.2)
    for step in range(100):
        if step >= 10:
            assert learning_rate_at(settings, step) == pytest.approx(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    cosine = optim("cosine", final_fraction=0.1)
    rates = ((learning_rate_at(each, step) for each in (settings, cosine)) for step in range(100))
    assert 0 < max(abs(one - other) for one, other in rates) / 2.0 < math.pi * 10 / 200


def test_the_last_update_has_the_rate_that_the_page_states():
    """The floor belongs to the step after the last, as in the published schedules."""
    floor, left = 0.1, 90  # steps after warm-up
    for shape in ("linear", "wsd"):
        settings = {"decay_steps": 20} if shape == "wsd" else {}
        length = 20 if shape == "wsd" else left
        last = learning_rate_at(optim(shape, final_fraction=floor, **settings), 99)
        assert last == pytest.approx(2.0 * (floor + (1 - floor) / length))
    last = learning_rate_at(optim("cosine", final_fraction=floor), 99)
    assert last == pytest.approx(2.0 * (floor + (1 - floor) * math.sin(math.pi / 2 / left) ** 2))
    for shape in ("linear", "cosine", "wsd"):
        assert learning_rate_at(optim(shape, final_fraction=floor), 100) == pytest.approx(0.2)


@pytest.mark.parametrize(("warmup", "decay", "length"), [(10, 0, 20), (90, 0, 10), (80, 20, 20)])
def test_wsd_decays_from_the_peak_within_what_warm_up_leaves(warmup, decay, length):
    schedule = ScheduleConfig(shape="wsd", warmup_steps=warmup, decay_steps=decay)
    wsd = OptimConfig(steps=100, learning_rate=2.0, schedule=schedule)
    assert wsd.decay_steps == length
    assert learning_rate_at(wsd, 100 - length) == 2.0
    assert learning_rate_at(wsd, 100 - length // 2) == pytest.approx(1.0)


def test_inverse_sqrt_halves_when_the_step_is_four_times_the_warmup() -> None:
    assert learning_rate_at(optim("inverse_sqrt"), 39) == pytest.approx(1.0)
