"""Caching keys and values instead of hidden states changes nothing, nor with stretched angles."""

import cmath
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pretrain.cli import main
from pretrain.config.model import RopeExtension
from pretrain.config.run import EngineConfig, RunConfig
from pretrain.engines.torch_engine import TorchEngine
from pretrain.evaluation.training_evaluation import evaluating
from pretrain.model.cached import CachedStream, HiddenStateStream, RowBuffer, new_stream
from pretrain.model.positions import Stretch, sinusoids_XD
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.export import write_export
from tests.helpers.models import VARIANTS, random_starts, random_tokens, stream_nll, tiny_model
from tests.helpers.tiny_runs import ALONE

CASES = {
    **VARIANTS,
    "same_length": {"same_length": True},
    "isolated_pre_norm": {"isolate_documents": True},
}
LENGTHS = [5, 9, 1, 1, 9, 9, 2, 9, 9, 9, 1, 9]


def read_whole(nll_of: Callable[..., Tensor], lengths: Sequence[int]) -> Tensor:
    """The losses of segments of these lengths."""
    total = sum(lengths)
    tokens_BT, starts_BT = random_tokens(3, total + 1), random_starts(3, total + 1)
    streams = (tokens_BT[:, :-1], tokens_BT[:, 1:], starts_BT[:, :-1])
    segments = zip(*(each.split(lengths, dim=1) for each in streams), strict=True)
    return torch.cat([nll_of(*segment) for segment in segments], dim=1)


@pytest.mark.parametrize(
    ("variant", "memory_length"),
    [
        *(("plain", length) for length in (0, 1, 8, 30)),
        *((name, (8, 30, 1)[place % 3]) for place, name in enumerate(CASES)),
        *((name, 0) for name in ("rope", "isolated", "memory_tokens", "compressive", "deltanet")),
    ],
)
def test_the_losses_are_those_of_remembered_hidden_states(variant, memory_length):
    options = CASES[variant]
    model = tiny_model(**options).eval()
    stream = new_stream(model, memory_length, max(LENGTHS))
    plain = options.get("compressed_length") or options.get("memory_tokens")
    assert isinstance(stream, CachedStream) == (not plain)
    stream_BT, starts_BT = (each(3, sum(LENGTHS) + 1) for each in (random_tokens, random_starts))
    with torch.no_grad():
        expected, _ = stream_nll(model, stream_BT, LENGTHS, starts_BT, memory_length=memory_length)
    torch.testing.assert_close(read_whole(stream.nll_BL, LENGTHS), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("memory_length", "num_tokens", "lengths", "rows"),
    [
        (10, 0, [4, 1, 3, 4, 4, 2] * 16, None),
        *((memory, 12, [8, 1, 1, 1, 1], 12) for memory in (0, 3, 400)),  # a short stream
    ],
)
def test_a_row_buffer_keeps_the_order_and_never_grows(memory_length, num_tokens, lengths, rows):
    rows_of_stream = torch.arange(400.0).view(1, 400, 1)
    buffer = RowBuffer(rows_of_stream, memory_length, max(lengths), num_tokens)
    before, end = buffer._rows.data_ptr(), 0
    for length in lengths:
        found = buffer.append(rows_of_stream[:, end : end + length])
        end += length
        assert torch.equal(found, rows_of_stream[:, max(0, end - length - memory_length) : end])
    assert buffer._rows.data_ptr() == before
    assert buffer._rows.shape[1] == rows or not rows


KINDS: list[RopeExtension] = ["ntk", "yarn"]
WIDTH, TRAINED, SEGMENTS = 16, 660, [9, 9, 4, 9, 9]


def frequency(kind: RopeExtension, pair: int, factor: float) -> float:
    """Of one pair of channels, as the papers write it: one number at a time."""
    base, exponent = 10_000.0, 2 * pair / WIDTH
    if kind == KINDS[0]:
        return (base * factor ** (WIDTH / (WIDTH - 2))) ** -exponent
    plain = base**-exponent
    rotations = TRAINED / (2 * math.pi / plain)  # the trained length over the wavelength
    if rotations < 1:
        return plain / factor
    if rotations > 32:
        return plain
    gamma = (rotations - 1) / (32 - 1)
    return (1 - gamma) * plain / factor + gamma * plain


@pytest.mark.parametrize("factor", [1.0, 2.5, 8.0])
@pytest.mark.parametrize("kind", KINDS)
def test_encodings_are_those_of_the_papers(kind: RopeExtension, factor: float) -> None:
    distances = torch.tensor([0.0, 1.0, 5.0, 700.0], dtype=torch.float64)
    found = sinusoids_XD(distances, WIDTH, Stretch(kind, factor, TRAINED))
    size = {"ntk": 1.0, "yarn": 0.1 * math.log(factor) + 1}[kind]
    for row, distance in zip(found.tolist(), distances.tolist(), strict=True):
        for pair in range(WIDTH // 2):
            turned = cmath.rect(size, distance * frequency(kind, pair, factor))
            assert row[pair] == pytest.approx(turned.imag, abs=1e-12)
            assert row[pair + WIDTH // 2] == pytest.approx(turned.real, abs=1e-12)


def model_of(kind: RopeExtension, trained_keys: int, *memory_length: int) -> TransformerXL:
    """Layers of memory length 8 saw `trained_keys` in training, others as many fewer."""
    options = {**VARIANTS["rope"], "num_heads": 1}  # of 16 channels
    model = tiny_model(**options, rope_extension=kind, memory_length=memory_length or 8).eval()
    if trained_keys:
        lengths = model.config.memory_lengths()
        model.trained_keys = tuple(trained_keys - 8 + length for length in lengths)
    return model


@pytest.mark.parametrize("lengths", [(8,), (3, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_keys_are_stretched_as_those_of_remembered_hidden_states(kind, lengths):
    model = model_of(kind, 17, *lengths)
    cached = read_whole(CachedStream(model, 24, max(SEGMENTS)).nll_BL, SEGMENTS)
    model.expect_keys(0, 0)  # another stream on the same model
    remembered = read_whole(HiddenStateStream(model, 24, max(SEGMENTS)).nll_BL, SEGMENTS)
    torch.testing.assert_close(cached, remembered, rtol=1e-10, atol=1e-10)
    unstretched = CachedStream(model_of("none", 17, *lengths), 24, max(SEGMENTS))
    plain = read_whole(unstretched.nll_BL, SEGMENTS)
    assert not torch.allclose(cached[:, 9:], plain[:, 9:], rtol=1e-3)


def test_only_layers_that_see_more_keys_than_in_training_are_stretched() -> None:
    model, plain = (model_of(kind, 17, 3, 8) for kind in ("ntk", "none"))
    hidden_BLD = torch.zeros(1, 9, 16, dtype=torch.float64)
    cases = ((8, 9, (1.0, 1.0)), (24, 9, (1.0, 33 / 17)), (24, 15, (18 / 12, 39 / 17)))
    for memory, segment, factors in cases:
        model.expect_keys(memory, segment)
        usual_CH = plain.positions(39, hidden_BLD)[0]
        distances_C = torch.arange(38, -1, -1, dtype=torch.float64)
        for layer, found_CH in enumerate(model.positions(39, hidden_BLD)):
            assert torch.equal(found_CH, usual_CH) == (factors[layer] == 1.0)
            stretch = Stretch("ntk", factors[layer], model.trained_keys[layer])
            expected_CH = sinusoids_XD(distances_C, WIDTH, stretch)
            torch.testing.assert_close(found_CH, expected_CH, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_text_is_read_with_the_angles_of_a_long_one(kind: RopeExtension) -> None:
    """Else the score of a text would depend on those that are scored beside it."""
    model, tokens_BL = model_of(kind, trained_keys=9), random_tokens(2, 5)
    found = new_stream(model, 24, 9, num_tokens=5).logits_BLV(tokens_BL)
    assert torch.equal(found, new_stream(model, 24, 9).logits_BLV(tokens_BL))
    assert not torch.allclose(found, new_stream(model, 0, 9).logits_BLV(tokens_BL), rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained_keys", [33, 0])
def test_up_to_the_keys_of_training_nothing_changes_by_a_bit(kind, trained_keys):
    """0: of a model that trains, no keys are known."""
    models = (model_of(kind, trained_keys), model_of("none", 0))
    streams = [CachedStream(model, 24, max(SEGMENTS)) for model in models]
    assert torch.equal(*(read_whole(stream.nll_BL, SEGMENTS) for stream in streams))


def test_training_goes_on_with_its_own_angles_after_an_evaluation_of_tasks() -> None:
    """A phase may begin with an evaluation, whose segments are longer than those before."""
    model, tokens_BL = model_of("ntk", trained_keys=0), random_tokens(2, 9)
    run = RunConfig(model=model.config, engine=EngineConfig(kind="torch"))
    engine = TorchEngine(run, model, ALONE, 1)
    before, _ = model(tokens_BL, tokens_BL)
    with evaluating(engine) as module:
        module.trained_keys = (2, 2)
        module.expect_keys(100, 0)
        during, _ = module(tokens_BL, tokens_BL)
    after, _ = model(tokens_BL, tokens_BL)
    assert torch.equal(after, before)
    assert not torch.allclose(during, before, rtol=1e-3)


def test_only_rotations_are_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(dtype=torch.float32)
    write_export(tmp_path / "model", model, RunConfig(model=model.config), 1, tmp_path)
    assert main(["evaluate", str(tmp_path / "model"), "--rope-extension", "yarn"]) == 2
    assert "--rope-extension" in capsys.readouterr().err
