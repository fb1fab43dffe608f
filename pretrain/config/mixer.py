"""What the system knows of a kind of layer: the facts of its token mixer. Torch-free.

A kind is a folder, `pretrain/mixers/NAME`, or a package that is installed and has the entry point
`xl_pretrain.mixers`. Its `facts.py` has one subclass of `Mixer`, its `module.py` the `nn.Module`
(docs/your-layer.md). Settings, lane parts, costs, optimizers, cards and `describe` ask the facts,
and know no kind by name.

`model` is a ModelConfig and `engine` an EngineConfig: their modules import this one.
"""

import functools
import importlib
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from foundation.errors import ConfigError, shown

ENTRY_POINTS = "xl_pretrain.mixers"
FOLDER = Path(__file__).parents[1] / "mixers"
EXACT_BYTES = 4  # of an element of a state and its products, float32
# rows: one per remembered token, or per group of tokens; none at first.
# documents: the number of each row's document; 0: the lane's current one, -1: the previous, ...
# state: of fixed size, zeros at first; it belongs to the document of the lane's last token.
PartKind = Literal["rows", "documents", "state"]
# matrix: from hidden channels to hidden channels; both sides grow with the model's width.
# projection: between the width of an embedding and the model's.
# table: a row of channels for each token, for each cluster of tokens, or for each memory token.
# vector: gains, biases, and what else does not decay; output_bias: a number per token or cluster.
Role = Literal["matrix", "projection", "table", "vector", "output_bias"]


@dataclass(frozen=True, kw_only=True)
class LanePart:
    """One tensor of a memory: [lanes, rows, *shape], or [lanes, *shape] if it is a state."""

    name: str  # also its name in checkpoints
    kind: PartKind
    shape: tuple[int, ...] = ()
    length: int = 0  # rows when the memory is full
    waiting: int = 0  # rows beyond `length` that wait until their group is complete
    in_float32: bool = False  # in every precision; without it the type of activations

    def num_bytes(self, activation_bytes: int) -> int:
        """Return the bytes of one lane when the memory is full."""
        rows = 1 if self.kind == "state" else self.length
        width = 4 if self.in_float32 or self.kind == "documents" else activation_bytes
        return rows * math.prod(self.shape) * width


class Weight(NamedTuple):
    """A parameter of one mixer."""

    shape: tuple[int, ...]
    role: Role = "matrix"
    stacked: int = 1  # matrices of equal shape, one above the other
    part: str = ""  # where it is counted; empty: under the mixer's kind


@dataclass(frozen=True, kw_only=True)
class SegmentSize:
    """What a layer reads in a forward pass: a segment of each lane."""

    lanes: int
    tokens: int  # per segment, memory tokens included
    memory: int = 0  # rows of each lane, compressed ones included
    gradient_segments: int = 1  # segments of one backward pass


class MixerFlops(NamedTuple):
    """FLOPs of a layer's mixer for one segment of one lane; a backward pass: 2 forward - saved."""

    forward: Mapping[str, float]  # by part
    saved: float = 0.0  # FLOPs that the backward pass saves where nothing needs a gradient
    repeated: float = 0.0  # FLOPs that selective checkpointing computes again


class Kept(NamedTuple):
    """Elements that a mixer keeps for its backward pass, as autograd does."""

    activations: float = 0.0  # per lane, in the type of activations
    exact: float = 0.0  # per lane, in float32; selective checkpointing computes them again
    shared: float = 0.0  # once for all lanes, in the type of activations


class LayerBytes(NamedTuple):
    """Bytes of a layer, or its mixer, for a segment of all lanes, counted tensor by tensor."""

    kept: float  # from forward to backward
    repeated: float = 0.0  # of these, what selective checkpointing computes again
    working: float = 0.0  # during the backward pass only
    workspace: float = 0.0  # of these, what fused kernels pass to each other
    inner: float = 0.0  # of those kept, the feed-forward part's


class Mixer:
    """The facts of one kind of layer; a kind that does not read rows carries its `states`."""

    title: ClassVar[str]  # its name in reports and cards
    module: ClassVar[str]  # the name of the class in `module.py`
    has_rows: ClassVar[bool] = False  # reads the layer's remembered inputs, as attention does
    settings: ClassVar[type | None] = None  # the dataclass of `model.mixers.KIND`

    def __init__(self, kind: str, package: str = "", distribution: str = "") -> None:
        """`distribution`: name and version of the one that contains the package; empty: ours."""
        self.kind, self.package, self.distribution = kind, package, distribution

    def check(self, model: Any) -> None:
        """Raise ConfigError if the kind does not support the model's settings."""

    def states(self, model: Any) -> tuple[LanePart, ...]:
        """Return the parts of fixed size that a lane carries, in the order of module arguments."""
        return ()

    def weights(self, model: Any) -> Mapping[str, Weight]:
        """Return the module's parameters by name."""
        raise NotImplementedError

    def flops(self, model: Any, segment: SegmentSize) -> MixerFlops:
        """Return the FLOPs of products of matrices, as `FlopCounterMode` counts them."""
        raise NotImplementedError

    def kept(self, model: Any, tokens: int) -> Kept:
        """Return the elements kept for a segment, except tensors of a number per head or token."""
        raise NotImplementedError

    def kept_bytes(self, model: Any, engine: Any, segment: SegmentSize, on_gpu: bool) -> LayerBytes:
        """Return what is kept, and what the backward pass needs besides."""
        width = activation_bytes(engine)
        kept = self.kept(model, segment.tokens)
        exact = max(width, EXACT_BYTES) * segment.lanes * kept.exact
        rows = width * (segment.lanes * kept.activations + kept.shared)
        # Exact elements are freed as their gradients are computed, so these need no bytes besides.
        return LayerBytes(rows + exact, exact, width * kept.shared)

    def memory_text(self, model: Any) -> str:
        """Return what is carried from segment to segment, as a sentence without a full stop."""
        return f"{self.title} carries a state of fixed size"

    def paths(self, model: Any, engine: Any) -> Sequence[str]:
        """Return how a GPU computes the mixer, and why not faster, one line per choice."""
        return ()

    def environment(self, model: Any, engine: Any, on_gpu: bool) -> Mapping[str, str]:
        """Return what the bits of the results depend on besides settings: name -> value."""
        return {}


def activation_bytes(engine: Any) -> int:
    """Return the bytes of an element of an activation, and of a weight that computes it."""
    return 4 if engine.number_format == "fp32" else 2


def chunks_of(tokens: int, longest: int) -> tuple[int, int]:
    """Return into how many chunks a segment is divided, and the tokens of each, the last padded."""
    number = -(-tokens // longest)
    return number, -(-tokens // number)


def kinds_here() -> list[str]:
    """Return the kinds that have a folder here."""
    return sorted(path.parent.name for path in FOLDER.glob("*/facts.py"))


@functools.cache
def mixer_facts(kind: str) -> Mixer:
    """Return the facts of a kind; ConfigError if it is not installed, or they are not complete."""
    package, distribution = f"pretrain.mixers.{kind}", ""
    if kind not in kinds_here():
        points = importlib.metadata.entry_points(group=ENTRY_POINTS)
        if kind not in points.names or not kind.isidentifier():
            known = ", ".join([*kinds_here(), *sorted(points.names)])
            raise ConfigError(
                f"model.layer_kinds: unknown kind {shown(kind)}; expected one of {known}, or "
                f"install the package that has it, an identifier, as entry point of {ENTRY_POINTS}"
            )
        point = points[kind]
        package = point.value
        distribution = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
    module = imported(f"{package}.facts")
    values = [value for value in vars(module).values() if isinstance(value, type)]
    own = [value for value in values if value.__module__ == module.__name__]
    if len(own := [value for value in own if issubclass(value, Mixer)]) != 1:
        raise ConfigError(f"{module.__file__}: found {len(own)} classes of Mixer, expected one")
    names = ["title", "module", "weights", "flops"]
    names += ["kept"] if own[0].kept_bytes is Mixer.kept_bytes else []
    if missing := [name for name in names if getattr(own[0], name, 0) is getattr(Mixer, name, 0)]:
        raise ConfigError(f"{module.__file__}: {own[0].__name__} needs {', '.join(missing)}")
    return own[0](kind, package, distribution)


def imported(name: str) -> Any:
    """Return a module of a kind of layer; ConfigError if its import fails."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # the code of others
        raise ConfigError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
