"""Checks of a kind of layer: that it carries state right, and that its facts are true.

A model of two such layers, with random size and weights, reads random documents in float64. A check
compares two ways to the same result and returns the largest difference.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from foundation.errors import shown
from foundation.settings import parse_config
from foundation.yaml_files import merge
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import DataConfig, RunConfig
from pretrain.costs.device_memory import layer_bytes
from pretrain.costs.flops import token_flops
from pretrain.model.cached import new_stream
from pretrain.model.memory import Memory, MemoryLayout, detached, selected_lanes
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL

LANES, LONGEST, VOCABULARY = 3, 150, 32  # LONGEST: tokens of a lane's text at most
EXACT, ROUNDED = 1e-9, 0.1  # limits of differences; in bf16 relative to the mean size
LONG, LONG_SEGMENT = 100_000, 1000  # tokens
FLOPS_LIMIT, BYTES_LIMIT = 0.01, 0.05  # relative differences


# What a check compares, the limit of the difference, and the function that measures it.
Measure = tuple[str, float, "Callable[[Any], float | Compared]"]


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
        return f"{self.meaning}: {self.note or f'{self.found:.2g}, at most {self.limit:g}'}"


class Compared(NamedTuple):
    """A number by the facts and as counted; their difference is relative to `scale`."""

    facts: float
    counted: float
    scale: float

    @property
    def difference(self) -> float:
        return abs(self.counted - self.facts) / self.scale


def check_mixer(kind: str, settings: Mapping[str, Any], seed: int = 0) -> list[Check]:
    """Return all checks of a kind with these settings of a model; ConfigError if they are wrong."""
    torch.manual_seed(seed)  # for the weights that the model draws
    numbers = torch.Generator().manual_seed(seed)
    return checked(CHECKS, Subject(_drawn_config(kind, settings, numbers), numbers))


def checked(measures: Mapping[str, Measure], subject: Any) -> list[Check]:
    """Return a check for each of the measures of the subject; an error is a failed check."""
    checks = []
    for name, (meaning, limit, measure) in measures.items():
        value, note = math.inf, ""
        try:
            result = measure(subject)
            if isinstance(result, Compared):
                value = result.difference
                numbers = f"{result.facts:,.0f} by the facts, {result.counted:,.0f} counted"
                note = f"{numbers} ({value:.2g}, at most {limit:g})"
            else:
                value = float(result)
        except Exception as error:  # the module may be unfinished
            note = f"{type(error).__name__}: {shown(str(error))}"
        checks.append(Check(name, meaning, value, limit, note))
    return checks


def _drawn_config(kind: str, settings: Mapping[str, Any], numbers: torch.Generator) -> ModelConfig:
    heads, half = (int(torch.randint(1, 4, (), generator=numbers)) for _ in range(2))
    tree: dict[str, Any] = {
        "vocab_size": VOCABULARY, "num_layers": 2, "layer_kinds": [kind], "num_heads": heads,
        "d_head": 2 * half, "d_model": 2 * heads * half, "d_inner": 8, "memory_length": LONGEST,
        "isolate_documents": True, "norm_position": "pre",
    }  # fmt: skip
    merge(tree, dict(settings))
    return parse_config(ModelConfig, tree, "check-mixer")


class Subject:
    """A model of the kind, and what it reads: tokens [B, T] and document starts."""

    def __init__(self, config: ModelConfig, numbers: torch.Generator) -> None:
        self.config, self._numbers = config, numbers
        length = 75 + int(torch.randint(LONGEST - 75, (), generator=numbers))
        self.tokens_BT = torch.randint(VOCABULARY, (LANES, length), generator=numbers)
        self.starts_BT = torch.rand(LANES, length, generator=numbers) < 0.1
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

    def layers_read(
        self,
        cuts: Sequence[int] = (),
        *,
        model: TransformerXL | None = None,
        tokens_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
        memory: Memory | None = None,
    ) -> tuple[Tensor, Memory]:
        """Return the layers' output, read in segments of lengths `cuts`, and the last memory."""
        tokens_BT = self.tokens_BT if tokens_BT is None else tokens_BT
        starts_BT = self.starts_BT if starts_BT is None else starts_BT
        parts, lengths = [], list(cuts) or [tokens_BT.shape[1]]
        tokens, starts = tokens_BT.split(lengths, dim=1), starts_BT.split(lengths, dim=1)
        with torch.no_grad():
            for tokens_BL, starts_BL in zip(tokens, starts, strict=True):
                hidden_BLD, memory, _ = (model or self.model).hidden_states(
                    tokens_BL, memory, starts_BL
                )
                parts.append(hidden_BLD)
        assert memory is not None
        return torch.cat(parts, dim=1), memory

    @cached_property
    def whole(self) -> tuple[Tensor, Memory]:
        return self.layers_read()


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of tensors; infinity if their shapes differ."""
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return math.inf
    pairs = zip(found, expected, strict=True)
    return _largest((one.double() - other.double()).abs().max() for one, other in pairs)


def _largest(values: Iterable[Any]) -> float:
    """Return the largest number; NaN if there is one, which `max` may pass over."""
    return float(torch.tensor([float(value) for value in values]).max())


def _segments(subject: Subject) -> float:
    hidden_BTD, memory = subject.whole
    tokens, differences = subject.tokens_BT.shape[1], []
    for cuts in (subject.cuts, [1] * 5 + [tokens - 5], [tokens - 1, 1]):
        found_BTD, after = subject.layers_read(cuts)
        differences.append(apart([found_BTD, *after], [hidden_BTD, *memory]))
    return _largest(differences)


def _gradients(subject: Subject) -> float:
    count = subject.tokens_BT.shape[1] // 4 * 4
    inputs = subject.tokens_BT[:, :count], None, subject.starts_BT[:, :count]
    gradients = []
    for segments in (1, 4):
        hidden_BTD, _, _ = subject.model.hidden_states(*inputs, num_segments=segments)
        weight_BTD = torch.linspace(-1, 1, hidden_BTD.numel()).view_as(hidden_BTD).double()
        parameters = [*subject.model.get_submodule("layers").parameters()]
        # Parameters that the layers' output does not depend on have no gradient.
        of_all = torch.autograd.grad((hidden_BTD * weight_BTD).sum(), parameters, allow_unused=True)
        gradients.append([gradient for gradient in of_all if gradient is not None])
    scale = max(float(gradient.abs().max()) for gradient in gradients[0])
    return apart(gradients[1], gradients[0]) / scale


def _isolation(subject: Subject) -> float:
    documents_BT, differences = subject.starts_BT.cumsum(1), []
    is_other_BT = documents_BT != documents_BT[:1, -1:] // 2
    is_other_BT[1:] = True
    tokens_BT = subject.tokens_BT.where(is_other_BT, (subject.tokens_BT + 1) % VOCABULARY)
    for cuts in ((), subject.cuts, [1] * tokens_BT.shape[1]):
        before_BTD, after_BTD = (
            subject.layers_read(cuts)[0],
            subject.layers_read(cuts, tokens_BT=tokens_BT)[0],
        )
        differences.append((after_BTD - before_BTD)[is_other_BT].abs().max())
    return _largest(differences)


def _starts(subject: Subject) -> float:
    """Read a document after others, from each place in a segment, and alone."""
    length, differences = 12, []
    alone_BTD, _ = subject.layers_read(
        tokens_BT=subject.tokens_BT[:, :length], starts_BT=subject.starts_BT[:, :length] & False
    )
    for before in (1, 2, 3, 5, 64):
        tokens_BT = torch.cat(
            [subject.tokens_BT[:, -before:], subject.tokens_BT[:, :length]], dim=1
        )
        starts_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        starts_BT[:, before] = True
        for cuts in ((), [before, length], [before + 1, length - 1], [before + length - 1, 1]):
            found_BTD, _ = subject.layers_read(cuts, tokens_BT=tokens_BT, starts_BT=starts_BT)
            differences.append(apart([found_BTD[:, before:]], [alone_BTD]))
    return _largest(differences)


def _lanes(subject: Subject) -> float:
    return _of_lanes(subject, [torch.tensor([1, 0, 2])])


def _slots(subject: Subject) -> float:
    return _of_lanes(subject, [slice(0, 1), slice(1, LANES)])


def _of_lanes(subject: Subject, groups: Sequence[Any]) -> float:
    """Compare lanes that are read together, and in each of these groups."""
    hidden_BTD, memory = subject.layers_read(subject.cuts)
    differences = []
    for lanes in groups:
        texts = subject.tokens_BT[lanes], subject.starts_BT[lanes]
        found_BTD, after = subject.layers_read(subject.cuts, tokens_BT=texts[0], starts_BT=texts[1])
        expected = [hidden_BTD[lanes], *selected_lanes(memory, lanes)]
        differences.append(apart([found_BTD, *after], expected))
    return _largest(differences)


def _saved(subject: Subject) -> float:
    layout, half = MemoryLayout(subject.config), subject.tokens_BT.shape[1] // 2
    tokens, starts = (
        whole_BT.tensor_split([half], 1) for whole_BT in (subject.tokens_BT, subject.starts_BT)
    )
    first_BTD, memory = subject.layers_read(tokens_BT=tokens[0], starts_BT=starts[0])
    named = {name: part.contiguous() for name, part in layout.named(detached(memory)).items()}
    loaded = layout.of_named(load(save(named)), LANES)
    assert loaded is not None, "the parts that were saved are no memory of this model"
    rest_BTD, after = subject.layers_read(
        model=subject.other_model(), tokens_BT=tokens[1], starts_BT=starts[1], memory=loaded
    )
    hidden_BTD, expected = subject.whole
    return apart([torch.cat([first_BTD, rest_BTD], dim=1), *after], [hidden_BTD, *expected])


def _stream(subject: Subject) -> float:
    stream = new_stream(subject.model, LONGEST, LONGEST)
    pairs = zip(subject.tokens_BT.split(1, 1), subject.starts_BT.split(1, 1), strict=True)
    found_BTV = torch.cat([stream.logits_BLV(*pair) for pair in pairs], dim=1)
    with torch.no_grad():
        expected_BTV = subject.model.head(subject.whole[0], None)
    return apart([found_BTV], [expected_BTV])


def _types(subject: Subject) -> float:
    """Count the parts that differ from their facts in shape or type, in float32 and bf16."""
    wrong = 0
    for dtype in (torch.float32, torch.bfloat16):
        model = subject.other_model().to(dtype)
        _, memory = subject.layers_read(subject.cuts, model=model)
        like = torch.zeros((), dtype=dtype)
        for part, empty in zip(
            memory, MemoryLayout(subject.config).empty(LANES, like), strict=True
        ):
            rows = slice(2, None) if empty.shape[1] == 0 else slice(1, None)
            wrong += part.dtype != empty.dtype or part.shape[rows] != empty.shape[rows]
    return wrong


def _long(subject: Subject) -> float:
    """Return the largest size of states in a long stream, relative to that after one segment."""
    model, sizes = subject.other_model(memory_length=16).float(), []
    memory, tokens_BL = None, subject.tokens_BT[:1].repeat(1, 20)[:, :LONG_SEGMENT]
    for _ in range(LONG // LONG_SEGMENT):
        _, memory = subject.layers_read(
            model=model, memory=memory, tokens_BT=tokens_BL, starts_BT=tokens_BL < 0
        )
        sizes.append(_largest(part.abs().max() for part in memory if part.is_floating_point()))
    return _largest(sizes) / sizes[0]


def _half(subject: Subject) -> float:
    """Compare with a model of the same rounded weights, token by token and in one segment."""
    model = subject.other_model().bfloat16()
    expected_BTD, _ = subject.layers_read(model=subject.other_model().bfloat16().double())
    differences = []
    for cuts in ((), [1] * subject.tokens_BT.shape[1]):
        found_BTD, _ = subject.layers_read(cuts, model=model)
        differences.append((found_BTD.double() - expected_BTD).abs().mean())
    return _largest(differences) / float(expected_BTD.abs().mean())


def _measured(kind: str, config: ModelConfig) -> ModelConfig:
    """Return a model large enough that numbers per head and token do not count."""
    wide = replace(config, num_heads=2, d_head=0, d_model=64, d_inner=8, memory_length=64)
    return replace(wide, num_layers=1, layer_kinds=(kind,))


def flop_counter() -> FlopCounterMode:
    """Return PyTorch's counter; a triangular solve counts as the product that it inverts."""
    solve = torch.ops.aten.linalg_solve_triangular
    counts = {solve: lambda matrix, columns, *_, **__: 2 * math.prod(columns) * matrix[-1]}
    return FlopCounterMode(display=False, custom_mapping=counts)


def _flops(subject: Subject) -> Compared:
    config = _measured(subject.config.kinds[0], subject.config)
    model, tokens_BT = TransformerXL(config, attention_kernel="plain"), torch.ones(2, 128).long()
    expected = token_flops(config, 64, 2)
    own = expected.forward - expected.parts["feed_forward"] - expected.parts["head"]
    _, memory = model(tokens_BT[:, :64], tokens_BT[:, 64:])
    with flop_counter() as counter:
        model(tokens_BT[:, :64], tokens_BT[:, 64:], memory)[0].sum().backward()
    return Compared(expected.training, counter.get_total_flops() / 128, 3 * own)


def _bytes(subject: Subject) -> Compared:
    config = replace(_measured(subject.config.kinds[0], subject.config), memory_length=0)
    kept = [_bytes_kept(replace(config, num_layers=layers)) for layers in (1, 2)]
    run = RunConfig(
        model=config,
        data=DataConfig(lanes=2, segment_length=128),
        engine=EngineConfig(attention_kernel="plain"),
    )
    expected = layer_bytes(run, 2, False, config.kinds[0], 0).kept
    return Compared(expected, kept[1] - kept[0], expected)


def _bytes_kept(config: ModelConfig) -> int:
    """Return the bytes that autograd keeps of a forward pass, besides weights."""
    model, tokens_BL = TransformerXL(config, attention_kernel="plain"), torch.ones(2, 128).long()
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
    _, memory = subject.layers_read(model=subject.other_model(memory_length=16).float())
    return lane_bytes_off(memory, replace(subject.config, memory_length=16))


def _parameters(subject: Subject) -> float:
    """Build the model, which compares its parameters with the facts by name and shape."""
    with torch.device("meta"):
        TransformerXL(subject.config)
    return 0.0


CHECKS: dict[str, Measure] = {
    "parameters": ("parameters of the module and its facts", 0.0, _parameters),
    "segments": ("one segment and several, also of one token", EXACT, _segments),
    "gradients": ("gradients through four segments and one", EXACT, _gradients),
    "isolation": ("other documents before and after one changes", 0.0, _isolation),
    "starts": ("a document after others and alone", EXACT, _starts),
    "lanes": ("lanes in another order", EXACT, _lanes),
    "slots": ("lanes together and apart", EXACT, _slots),
    "saved": ("one model, and a second one that continues from saved parts", EXACT, _saved),
    "stream": ("a stream token by token and one segment", EXACT, _stream),
    "types": ("parts of another shape or type than in the facts", 0.0, _types),
    "long": ("growth of states over 100,000 tokens", 100.0, _long),
    "bf16": ("mean difference in bf16, relative to the mean size", ROUNDED, _half),
    "flops": ("FLOPs of a token in training", FLOPS_LIMIT, _flops),
    "bytes": ("bytes of a layer kept for the backward pass", BYTES_LIMIT, _bytes),
    "lane bytes": ("bytes of a lane, facts and counted", 0.0, _lane_bytes),
}
