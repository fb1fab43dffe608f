"""Checks of a kind of layer: that it carries state right, and that its facts are true.

A model of two such layers, with random size and weights, reads random documents in float64. A check
compares two ways to the same result and returns the largest difference.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from foundation.errors import ConfigError
from foundation.settings import parse_config
from foundation.yaml_files import merge
from pretrain.config.engine import EngineConfig
from pretrain.config.mixer import (
    ENTRY_POINTS,
    Mixer,
    SegmentSize,
    activation_bytes,
    mixer_facts,
)
from pretrain.config.model import ModelConfig, Precision
from pretrain.config.run import DataConfig, RunConfig
from pretrain.costs.device_memory import layer_bytes
from pretrain.costs.flops import token_flops
from pretrain.model.cached import new_stream
from pretrain.model.memory import Memory, MemoryLayout, selected_lanes
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL

LANES, SHORT, LONGEST, VOCABULARY = 5, 150, 400, 32  # tokens of a lane's text at most
EXACT, ROUNDED = 1e-9, 0.1  # limits of differences; in bf16 relative to the mean size
STEP, SLOPE = 1e-8, 1e-5  # of finite differences, and the limit of their relative difference
LONG, LONG_SEGMENT = 100_000, 1000  # tokens
# Relative to the mixer's own; in bf16, norms on a CPU keep float32.
FLOPS_LIMIT, BYTES_LIMIT, ROUNDED_BYTES_LIMIT = 0.01, 0.05, 0.25
DRAWN, DRAWS = ("d_model", "num_heads", "d_head"), 60  # draws until the facts accept one
NOT_ISOLATED = (0.0, "not applicable: model.isolate_documents=false")
# What FLOPs and bytes are counted for, the least d_model, and the precision of bytes. No number is
# twice another, and numbers per head and token do not count.
SIZES: tuple[tuple[SegmentSize, int, Precision], ...] = (
    (SegmentSize(lanes=3, tokens=160, memory=160), 64, "fp32"),
    (SegmentSize(lanes=2, tokens=160, memory=160, gradient_segments=2), 96, "bf16"),
)
Result = float | tuple[float, str]  # a difference, and what to say of it
# What a check compares, the limit of the difference, and the function that measures it.
Measure = tuple[str, float, Callable[[Any], Result]]


@dataclass(frozen=True)
class Check:
    """What a check found; it passes up to its limit. NaN and infinity never pass."""

    name: str
    meaning: str
    found: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.found <= self.limit

    @property
    def description(self) -> str:
        """What was compared, and the result."""
        return f"{self.meaning}: {self.note or f'{self.found:.3g}, at most {self.limit:g}'}"


def check_mixer(kind: str, settings: Mapping[str, Any], seed: int = 0) -> list[Check]:
    """Return all checks of a kind with these settings of a model; ConfigError if they are wrong."""
    if not mixer_facts(kind).distribution and kind in entry_points(group=ENTRY_POINTS).names:
        raise ConfigError(f"{kind} is a kind of this project; rename the entry point {kind}")
    torch.manual_seed(seed)  # for the weights that the model draws
    numbers = torch.Generator().manual_seed(seed)
    return checked(CHECKS, Subject(_drawn_config(kind, settings, numbers), numbers))


def checked(measures: Mapping[str, Measure], subject: Any) -> list[Check]:
    """Return a check for each of the measures; after an error in the first, no others."""
    checks = []
    for name, (meaning, limit, measure) in measures.items():
        value, note = math.inf, ""
        try:
            result = measure(subject)
            value, note = result if isinstance(result, tuple) else (float(result), "")
            note += f" ({value:.2g}, at most {limit:g})" if note and value else ""
        except Exception as error:  # the module may be unfinished
            note = f"{type(error).__name__}: {' '.join(str(error).split())}"
        checks.append(Check(name, meaning, value, limit, note))
        if len(checks) == 1 and math.isinf(value):
            break
    return checks


def _drawn_config(kind: str, settings: Mapping[str, Any], numbers: torch.Generator) -> ModelConfig:
    """Return a small model that the facts accept, with widths that grow with the draws."""
    refused, given = None, settings.get("num_heads")
    for draw in range(DRAWS):
        heads, half = (int(torch.randint(1, 4, (), generator=numbers)) for _ in range(2))
        heads, half = given if isinstance(given, int) else heads, half * (1 + draw // 6)
        tree: dict[str, Any] = {
            "vocab_size": VOCABULARY, "num_layers": 2, "layer_kinds": [kind], "num_heads": heads,
            "d_head": 2 * half, "d_model": 2 * heads * half, "d_inner": 8, "feed_forward": "gelu",
            "memory_length": LONGEST, "isolate_documents": True, "norm_position": "pre",
        }  # fmt: skip
        merge(tree, dict(settings))
        try:
            return parse_config(ModelConfig, tree, "check-mixer")
        except ConfigError as error:
            refused = error
    raise ConfigError(f"{refused} (check-mixer draws {', '.join(DRAWN)} that are not set)")


class Subject:
    """A model of the kind, and what it reads: tokens [B, T] and document starts."""

    def __init__(self, config: ModelConfig, numbers: torch.Generator) -> None:
        self.config, self._numbers = config, numbers
        length = 75 + int(torch.randint(SHORT - 75, (), generator=numbers))
        self.tokens_BT = torch.randint(VOCABULARY, (LANES, length), generator=numbers)
        self.starts_BT = torch.rand(LANES, length, generator=numbers) < 0.1
        self.text = (self.tokens_BT, self.starts_BT)
        ends = sorted({1, length, *torch.randint(1, length, (5,), generator=numbers).tolist()})
        self.cuts = [end - before for before, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def model(self) -> TransformerXL:
        """A model in float64 whose weights are large enough for every part to matter."""
        model = TransformerXL(self.config, attention_kernel="plain").double()
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, generator=self._numbers, dtype=torch.float64)
                parameter.add_(0.2 * drawn)
        return model

    def other_model(self, **options: Any) -> TransformerXL:
        """Return another model with the same weights."""
        model = TransformerXL(replace(self.config, **options), attention_kernel="plain").double()
        load_parameters(model, dict(self.model.named_parameters()))
        return model

    def result(
        self,
        cuts: Sequence[int] = (),
        *,
        model: TransformerXL | None = None,
        text: Sequence[Tensor] | None = None,
        memory: Sequence[Tensor] | None = None,
        gradient: bool = False,
    ) -> list[Tensor]:
        """Return the layers' output, read in segments of lengths `cuts`, and the parts after it."""
        tokens_BT, starts_BT = text or self.text
        model, outputs, lengths = model or self.model, [], list(cuts) or [tokens_BT.shape[1]]
        tokens, starts = tokens_BT.split(lengths, dim=1), starts_BT.split(lengths, dim=1)
        with torch.set_grad_enabled(gradient):
            for tokens_BL, starts_BL in zip(tokens, starts, strict=True):
                before = tuple(memory) if memory else None
                hidden_BLD, memory, _ = model.hidden_states(tokens_BL, before, starts_BL)
                outputs.append(hidden_BLD)
        assert memory is not None
        return [torch.cat(outputs, dim=1), *memory]

    @cached_property
    def whole(self) -> list[Tensor]:
        return self.result()


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of tensors; infinity if their shapes differ."""
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return math.inf
    pairs = zip(found, expected, strict=True)
    return _largest((one - other).detach().double().abs().max() for one, other in pairs)


def _largest(values: Iterable[Any]) -> float:
    """Return the largest number; NaN if there is one, which `max` may pass over."""
    return float(torch.tensor([0.0, *(float(value) for value in values)]).max())


def _segments(subject: Subject) -> float:
    tokens = subject.tokens_BT.shape[1]
    all_cuts = (subject.cuts, [1] * 5 + [tokens - 5], [tokens - 1, 1])
    differences = [apart(subject.result(cuts), subject.whole) for cuts in all_cuts]
    long = [rows.repeat(1, 6)[:, :LONGEST] for rows in subject.text]
    at_once, parts = (subject.result(cuts, text=long) for cuts in ((), [50] * 8))
    return _largest([*differences, apart(parts, at_once)])


def _joined(subject: Subject) -> float:
    """Read documents, which the last part numbers, without isolation and as one document."""
    *whole, _ = subject.result(text=(subject.tokens_BT, subject.starts_BT & False))
    model, all_cuts = subject.other_model(isolate_documents=False), ((), subject.cuts)
    return _largest(apart(subject.result(cuts, model=model)[:-1], whole) for cuts in all_cuts)


def _modes(subject: Subject) -> float:
    """Compare training with gradients, and evaluation, with training without gradients."""
    cuts, expected = subject.cuts, subject.result(subject.cuts)
    trained = subject.result(cuts, gradient=True)
    evaluated = subject.result(cuts, model=subject.other_model().eval())
    return _largest(apart(outputs, expected) for outputs in (trained, evaluated))


def _gradients(subject: Subject) -> float:
    """Compare a derivative through four segments, in a random direction, with differences."""
    count, model = subject.tokens_BT.shape[1] // 4 * 4, subject.other_model()
    inputs = subject.tokens_BT[:, :count], None, subject.starts_BT[:, :count]
    parameters = [*model.parameters()]

    def result() -> Tensor:
        hidden_BTD, _, _ = model.hidden_states(*inputs, num_segments=4)
        return (torch.linspace(-1, 1, hidden_BTD.numel()).view_as(hidden_BTD) * hidden_BTD).sum()

    # A parameter that nothing depends on, by autograd, has no gradient.
    gradients = torch.autograd.grad(result(), parameters, allow_unused=True)
    directions = [torch.randn_like(parameter) for parameter in parameters]
    pairs = zip(gradients, directions, strict=True)
    slopes = torch.cat([(g * along).flatten() for g, along in pairs if g is not None])
    ends = []
    with torch.no_grad():
        for step in (STEP, -2 * STEP):
            for parameter, along in zip(parameters, directions, strict=True):
                parameter.add_(along, alpha=step)
            ends.append(result())
    return float(abs((ends[0] - ends[1]) / (2 * STEP) - slopes.sum()) / slopes.norm())


def _isolation(subject: Subject) -> Result:
    if not subject.config.isolate_documents:
        return NOT_ISOLATED
    documents_BT, differences = subject.starts_BT.cumsum(1), []
    is_other_BT = documents_BT != documents_BT[:1, -1:] // 2
    is_other_BT[1:] = True
    tokens_BT = subject.tokens_BT.where(is_other_BT, (subject.tokens_BT + 1) % VOCABULARY)
    for cuts in ((), subject.cuts, [1] * tokens_BT.shape[1]):
        changed_BTD, *_ = subject.result(cuts, text=(tokens_BT, subject.starts_BT))
        differences.append((changed_BTD - subject.result(cuts)[0])[is_other_BT].abs().max())
    return _largest(differences)


def _starts(subject: Subject) -> Result:
    """Read a document after others, from each place in a segment, and alone."""
    if not subject.config.isolate_documents:
        return NOT_ISOLATED
    length, differences = 12, []
    alone = (subject.tokens_BT[:, :length], subject.starts_BT[:, :length] & False)
    alone_BTD, *_ = subject.result(text=alone)
    for before in (1, 2, 3, 5, 64):
        tokens_BT = torch.cat([subject.tokens_BT[:, -before:], subject.tokens_BT[:, :length]], 1)
        starts_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        starts_BT[:, before] = True
        for cuts in ((), [before, length], [before + 1, length - 1], [before + length - 1, 1]):
            found_BTD, *_ = subject.result(cuts, text=(tokens_BT, starts_BT))
            differences.append(apart([found_BTD[:, before:]], [alone_BTD]))
    return _largest(differences)


def _lanes(subject: Subject, groups: Sequence[Any]) -> float:
    """Compare lanes that are read together, and in each of these groups."""
    whole, differences = subject.result(subject.cuts), []
    for lanes in groups:
        read = subject.result(subject.cuts, text=[rows[lanes] for rows in subject.text])
        differences.append(apart(read, selected_lanes(tuple(whole), lanes)))
    return _largest(differences)


def _saved(subject: Subject) -> float:
    layout, half = MemoryLayout(subject.config), subject.tokens_BT.shape[1] // 2
    first, second = zip(*(rows.tensor_split([half], 1) for rows in subject.text), strict=True)
    first_BTD, *memory = subject.result(text=first)
    named = {name: part.contiguous() for name, part in layout.named(tuple(memory)).items()}
    loaded = layout.of_named(load(save(named)), LANES)
    rest_BTD, *after = subject.result(model=subject.other_model(), text=second, memory=loaded)
    return apart([torch.cat([first_BTD, rest_BTD], dim=1), *after], subject.whole)


def _stream(subject: Subject) -> float:
    stream = new_stream(subject.other_model(), LONGEST, SHORT)
    pairs = zip(subject.tokens_BT.split(1, 1), subject.starts_BT.split(1, 1), strict=True)
    found_BTV = torch.cat([stream.logits_BLV(*pair) for pair in pairs], dim=1)
    with torch.no_grad():
        expected_BTV = subject.model.head(subject.whole[0], None)
    return apart([found_BTV], [expected_BTV])


def _types(subject: Subject) -> Result:
    """Compare shapes and types of parts with their facts; in bf16, float32 is not rounded."""
    layout, wrong, half = MemoryLayout(subject.config), [], subject.other_model().bfloat16()
    _, *exact = subject.result(subject.cuts, model=subject.other_model().bfloat16().double())
    for model in (subject.other_model().float(), half):
        _, *memory = subject.result(subject.cuts, model=model)
        expected = layout.empty(LANES, next(model.parameters()))
        for name, part, empty, real in zip(
            (part.name for part in layout.parts), memory, expected, exact, strict=True
        ):
            rows = slice(2, None) if empty.shape[1] == 0 else slice(1, None)
            is_exact = part.dtype is not torch.float32 or not part.equal(part.bfloat16().float())
            if part.dtype != empty.dtype or part.shape[rows] != empty.shape[rows]:
                types = f"{empty.dtype} {[*empty.shape]}, found {part.dtype} {[*part.shape]}"
                wrong.append(f"{name}: expected {types}")
            elif model is half and not is_exact and part.ne(real).any():
                wrong.append(f"{name}: float32 in the facts, but its values are rounded to bf16")
    return len(wrong), "; ".join(wrong)


def _long(subject: Subject) -> float:
    """Return the largest size of states in a long stream, relative to that after one segment."""
    model, sizes = subject.other_model(memory_length=16).float(), []
    memory, tokens_BL = None, subject.tokens_BT[:1].repeat(1, 20)[:, :LONG_SEGMENT]
    for _ in range(LONG // LONG_SEGMENT):
        _, *memory = subject.result(model=model, memory=memory, text=(tokens_BL, tokens_BL < 0))
        sizes.append(_largest(part.abs().max() for part in memory if part.is_floating_point()))
    return _largest(sizes) / (sizes[0] or 1.0)


def _half(subject: Subject) -> float:
    """Compare with a model of the same rounded weights, token by token and in one segment."""
    model = subject.other_model().bfloat16()
    expected_BTD, *_ = subject.result(model=subject.other_model().bfloat16().double())
    single = [1] * subject.tokens_BT.shape[1]
    outputs = (subject.result(cuts, model=model)[0] for cuts in ((), single))
    differences = [(output_BTD - expected_BTD).abs().mean() for output_BTD in outputs]
    return _largest(differences) / float(expected_BTD.abs().mean())


def _measured(config: ModelConfig, width: int, memory: int = 0, layers: int = 1) -> ModelConfig:
    """Return a model whose width is a multiple of the drawn one's, and at least `width`."""
    factor = max(2, -(-width // config.d_model))
    wide = replace(config, d_model=factor * config.d_model, d_head=factor * config.head_width)
    return replace(wide, num_layers=layers, layer_kinds=config.kinds[:1], memory_length=memory)


def _compared(numbers: Sequence[float], facts: Mapping[str, float], shape: str) -> Result:
    """Compare numbers by the facts and counted, relative to the third: the mixer's own, or for
    bytes its input and output, if it has none."""
    expected, counted, own = numbers
    parts = ", ".join(f"{name} {number:,.0f}" for name, number in facts.items())
    note = f"{expected:,.0f} by the facts ({parts}), {counted:,.0f} counted, with {shape}"
    return abs(counted - expected) / own, note


def flop_counter() -> FlopCounterMode:
    """Return PyTorch's counter; a triangular solve counts as the product that it inverts."""
    solve = torch.ops.aten.linalg_solve_triangular
    counts = {solve: lambda matrix, columns, *_, **__: 2 * math.prod(columns) * matrix[-1]}
    return FlopCounterMode(display=False, custom_mapping=counts)


def _flops(subject: Subject, number: int) -> Result:
    size, width, _ = SIZES[number]
    config, segments = _measured(subject.config, width, size.memory), size.gradient_segments
    tokens_BT = torch.ones(size.lanes, segments * size.tokens).long()
    model = TransformerXL(config, attention_kernel="plain")
    _, memory = model(tokens_BT, tokens_BT)
    with flop_counter() as counter:
        model(tokens_BT, tokens_BT, memory, num_segments=segments)[0].sum().backward()
    expected = token_flops(config, size.tokens, size.lanes, segments)
    own = expected.forward - expected.parts["feed_forward"] - expected.parts["head"]
    numbers = (expected.training, counter.get_total_flops() / tokens_BT.numel(), 3 * own)
    facts = {**expected.parts, "saved": expected.without_gradient}
    return _compared(numbers, facts, f"d_model={config.d_model}, {size}")


def _bytes(subject: Subject, number: int) -> Result:
    size, width, precision = SIZES[number]
    config, size = _measured(subject.config, width), replace(size, memory=0)
    engine = EngineConfig(attention_kernel="plain", precision=precision)
    data = DataConfig(lanes=size.lanes, segment_length=size.tokens)
    run, mixer = RunConfig(model=config, data=data, engine=engine), config.mixer(0)
    own = mixer.kept_bytes(config, engine, size, False)
    rest = layer_bytes(run, size.lanes, False, mixer.kind, 0).kept - own.kept
    models = (_measured(subject.config, width, layers=layers) for layers in (1, 2))
    one, two = (_bytes_kept(model, size, precision) for model in models)
    facts = own if type(mixer).kept is Mixer.kept else mixer.kept(config, size.tokens)
    shape = f"d_model={config.d_model}, {precision}, {size}"
    ends = 2 * size.lanes * size.tokens * config.d_model * activation_bytes(engine)
    return _compared((own.kept, two - one - rest, own.kept or ends), facts._asdict(), shape)


def _bytes_kept(config: ModelConfig, size: SegmentSize, precision: Precision) -> int:
    """Return the bytes that autograd keeps of a forward pass, besides weights."""
    model = TransformerXL(config, attention_kernel="plain")
    model = model.bfloat16() if precision == "bf16" else model
    tokens_BL = torch.ones(size.lanes, size.tokens).long()
    return bytes_kept_by(model, lambda: model(tokens_BL, tokens_BL, None, tokens_BL < 0))


def bytes_kept_by(model: torch.nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes that autograd keeps of a forward pass of the model, besides weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # keeps its address from other tensors
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = forward()  # kept until all is counted
    del outputs
    return sum(kept[place].untyped_storage().nbytes() for place in kept.keys() - weights)


def lane_bytes_off(memory: Memory, config: ModelConfig) -> float:
    """Return by how many bytes a lane's full memory differs from the facts, in float32."""
    carried = sum(part[0].numel() * part.element_size() for part in memory)
    return abs(carried - MemoryLayout(config).parts.num_bytes(4))


def _lane_bytes(subject: Subject) -> float:
    _, *memory = subject.result(model=subject.other_model(memory_length=16).float())
    return lane_bytes_off(tuple(memory), replace(subject.config, memory_length=16))


def _parameters(subject: Subject) -> Result:
    """Build and run the model; both sides of a matrix grow with the model's width."""
    config, wide, wrong = subject.config, _measured(subject.config, 0), []
    with torch.device("meta"):
        TransformerXL(config)
    try:
        subject.result()
    except Exception as error:
        drawn = ", ".join(f"{name}={getattr(config, name)}" for name in DRAWN)
        raise ValueError(f"{error}; with {drawn}, which `check` of the facts accepts") from error
    mixer = config.mixer(0)
    for name, weight in mixer.weights(config).items():
        sides = weight.shape, mixer.weights(wide)[name].shape
        is_flat, grows = len(sides[0]) < 2, len(sides[0]) == 2 and all(map(int.__lt__, *sides))
        if (weight.role == "matrix" and is_flat) or (weight.role == "vector" and grows):
            wrong.append(f"{name}: role {weight.role} with the shapes {sides[0]} and {sides[1]}")
    return len(wrong), "; ".join(wrong)


CHECKS: dict[str, Measure] = {
    "parameters": ("parameters in module and facts, and their roles", 0.0, _parameters),
    "segments": ("one segment and several, also of one token", EXACT, _segments),
    "joined": ("documents that are not isolated, and one document", EXACT, _joined),
    "modes": ("training with and without gradients, and evaluation", EXACT, _modes),
    "gradients": ("gradients through four segments, and finite differences", SLOPE, _gradients),
    "isolation": ("other documents before and after one changes", 0.0, _isolation),
    "starts": ("a document after others and alone", EXACT, _starts),
    "lanes": (
        "lanes in another order",
        EXACT,
        lambda of: _lanes(of, [torch.arange(LANES).flip(0)]),
    ),
    "slots": (
        "lanes together and apart",
        EXACT,
        lambda of: _lanes(of, [slice(0, 1), slice(1, LANES)]),
    ),
    "saved": ("one model, and a second one that continues from saved parts", EXACT, _saved),
    "stream": ("a stream token by token and one segment", EXACT, _stream),
    "types": ("parts of another shape or type than in the facts, or rounded", 0.0, _types),
    "long": ("growth of states over 100,000 tokens; 100 is linear", 1000.0, _long),
    "bf16": ("mean difference in bf16, relative to the mean size", ROUNDED, _half),
    "flops": ("FLOPs of a token in training", FLOPS_LIMIT, lambda of: _flops(of, 0)),
    "more flops": ("of another size, in two segments", FLOPS_LIMIT, lambda of: _flops(of, 1)),
    "bytes": ("bytes of a mixer kept for the backward pass", BYTES_LIMIT, lambda of: _bytes(of, 0)),
    "bf16 bytes": ("of another size, in bf16", ROUNDED_BYTES_LIMIT, lambda of: _bytes(of, 1)),
    "lane bytes": ("bytes of a lane, facts and counted", 0.0, _lane_bytes),
}
