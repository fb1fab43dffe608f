"""Attention mass by distance: how far back the heads of a trained model look.

The weights are the model's own: its layers' inputs to attention, put through the functions that
attention itself uses. X bins of distances; other letters of shapes as in `pretrain.model`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.evaluation_stream import EvaluationStream, useful_lanes
from pretrain.config.model import ModelConfig
from pretrain.engines.engine import batch_tensors
from pretrain.evaluation.probes.document_position import distance_bins, first_distances
from pretrain.model.attention_backends import weights_and_values
from pretrain.model.memory import Memory, num_compressed_rows, num_rows
from pretrain.model.transformer_xl import TransformerXL

PARTS = ("compressed", "memory", "segment")  # where keys come from, in the keys' order
MEASURED_SEGMENTS = 4  # per lane, after memory has reached its full length
MOST_LANES = 8
MOST_WEIGHTS = 1 << 26  # attention weights that one layer computes at a time


@dataclass(frozen=True, kw_only=True)
class AttentionMass:
    """Means over queries, per layer and head.

    A row's weights sum to 1 over parts and bins, less what a sink takes.
    """

    layers: tuple[int, ...]  # the model's layers that attend, counted from 0
    first_distances: tuple[int, ...]  # in keys: where each bin starts
    mass: dict[str, list[list[list[float]]]]  # for each of PARTS: [layer][head][bin]
    entropy: list[list[float]]  # nats
    mean_distance: list[list[float]]  # in keys, of the mass that no sink takes
    # If all keys that a query sees had equal weights, in the layer with the longest memory.
    uniform_entropy: float
    queries: int
    memory_length: int  # the most rows of memory that queries had
    compressed_length: int  # the most compressed rows

    def share(self, part: str) -> list[list[float]]:
        """Return the mass on compressed rows, memory or segment, [layer][head]."""
        return [[sum(bins) for bins in layer] for layer in self.mass[part]]

    def total(self) -> list[list[list[float]]]:
        """Return the mass of every bin, [layer][head][bin]."""
        parts = [torch.tensor(self.mass[part], dtype=torch.float64) for part in PARTS]
        return torch.stack(parts).sum(0).tolist()


@dataclass
class _Sums:
    """Sums over the queries of the measured segments, by layer, in float64."""

    num_bins: int
    mass: dict[int, Tensor] = field(default_factory=dict)  # [N, 3 X]
    entropy: dict[int, Tensor] = field(default_factory=dict)  # [N]
    distance: dict[int, Tensor] = field(default_factory=dict)  # [N]
    uniform: float = 0.0
    queries: int = 0

    def add(self, layer: int, weights_NBLC: Tensor, valid_BL: Tensor, num_compressed: int) -> None:
        """Add one layer's weights of the valid queries."""
        L, C = weights_NBLC.shape[2:]
        device = weights_NBLC.device
        columns_C = torch.arange(C, device=device)
        distances_LC = torch.arange(C - L, C, device=device)[:, None] - columns_C
        parts_C = (columns_C >= num_compressed).long() + (columns_C >= C - L)
        bins_LC = parts_C * self.num_bins + distance_bins(distances_LC)
        counted_NBLC = weights_NBLC * valid_BL[:, :, None]
        summed_NLC = counted_NBLC.sum(1, dtype=torch.float64)
        mass_NX = summed_NLC.new_zeros(len(summed_NLC), len(PARTS) * self.num_bins)
        mass_NX.index_add_(1, bins_LC.flatten(), summed_NLC.flatten(1))
        entropy_N = torch.special.entr(counted_NBLC).sum((1, 2, 3), dtype=torch.float64)
        distance_N = (summed_NLC * distances_LC).sum((1, 2))
        for name, new in (("mass", mass_NX), ("entropy", entropy_N), ("distance", distance_N)):
            sums = getattr(self, name)
            sums[layer] = sums.get(layer, 0.0) + new.cpu()

    def add_queries(self, seen_BLC: Tensor, valid_BL: Tensor) -> None:
        """Count queries, and the entropy that equal weights on the keys they see would have."""
        entropy_BL = seen_BLC.sum(-1).double().log().expand_as(valid_BL)
        self.uniform += float(entropy_BL.where(valid_BL, 0.0).sum())
        self.queries += int(valid_BL.sum())


@contextmanager
def _observed(
    module: TransformerXL, sums: _Sums, valid_BL: Tensor, num_compressed: int
) -> Iterator[None]:
    """In the block, let each attention layer add its weights to `sums` whenever it is called."""

    lengths = module.config.attended_lengths
    longest_layer = lengths.index(max(lengths))

    def hook_of(layer: int) -> Any:
        def hook(attention: Any, inputs: Any, options: dict[str, Any]) -> None:
            visibility = options["visibility"]
            query_BLNH, parts, terms = attention.inputs(*inputs, visibility=visibility)
            weights_NBLC, _ = weights_and_values(query_BLNH, parts, terms, visibility)
            sums.add(layer, weights_NBLC, valid_BL, num_compressed)
            if layer == longest_layer:
                sums.add_queries(visibility.mask == 0, valid_BL)

        return hook

    mixers: list[Any] = [layer.mixer for layer in _layers_with_rows(module).values()]
    handles = [
        mixer.register_forward_pre_hook(hook_of(number), with_kwargs=True)
        for number, mixer in enumerate(mixers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measured_stream(
    corpus: Corpus, config: ModelConfig, memory_length: int, segment_length: int
) -> tuple[EvaluationStream, int]:
    """Return what to read, and how many of its batches come before those that are measured.

    Segments are measured once memory has its full length. If the split is too short for that, its
    last segment is measured.
    """
    compressed = config.compressed_length if memory_length else 0
    warm_up = -(-(memory_length + compressed * config.compression_rate) // segment_length)
    num_keys = segment_length + memory_length + compressed + config.compression_rate
    fitting = MOST_WEIGHTS // (config.num_heads * segment_length * num_keys)
    tokens = (warm_up + MEASURED_SEGMENTS) * segment_length
    wanted = max(1, min(MOST_LANES, fitting, corpus.num_tokens // tokens))
    lanes = useful_lanes(corpus, wanted, segment_length, wanted * tokens)
    stream = EvaluationStream(corpus, lanes, segment_length, range(lanes), wanted * tokens)
    return stream, min(warm_up, len(stream) - 1)


@torch.no_grad()
def attention_mass(
    module: TransformerXL, corpus: Corpus, *, memory_length: int, segment_length: int
) -> AttentionMass:
    """Return the mean attention over a part of the split, read in segments with memory."""
    module.eval()
    config, device = module.config, next(module.parameters()).device
    stream, first = measured_stream(corpus, config, memory_length, segment_length)
    module.expect_keys(memory_length, segment_length)
    num_keys = segment_length + memory_length + config.compressed_length + config.compression_rate
    sums = _Sums(int(distance_bins(torch.tensor(num_keys))) + 1)
    memory: Memory | None = None
    rows = [0, 0]
    for number, batch in enumerate(stream):
        tokens_BL, _, starts_BL = batch_tensors(batch, device)
        num_compressed = num_compressed_rows(config, memory)
        measured: AbstractContextManager[None] = nullcontext()
        if number >= first:
            rows = [max(rows[0], num_rows(memory)), max(rows[1], num_compressed)]
            valid_BL = torch.from_numpy(batch.valid_BL).to(device)
            measured = _observed(module, sums, valid_BL, num_compressed)
        with measured:
            _, memory, _ = module.hidden_states(
                tokens_BL, memory, starts_BL, memory_length=memory_length
            )
    return _means(tuple(_layers_with_rows(module)), sums, rows[0], rows[1])


def _layers_with_rows(module: TransformerXL) -> dict[int, Any]:
    layers = enumerate(module.layers)
    return {number: layer for number, layer in layers if module.config.mixer(number).has_rows}


def _means(
    layers: tuple[int, ...], sums: _Sums, memory_length: int, compressed_length: int
) -> AttentionMass:
    mass = torch.stack([sums.mass[layer] for layer in sorted(sums.mass)]) / sums.queries
    mass_PINX = mass.unflatten(2, (len(PARTS), sums.num_bins)).permute(2, 0, 1, 3)
    used = int(mass_PINX.sum((0, 1, 2)).nonzero().max()) + 1
    entropy = [(sums.entropy[layer] / sums.queries).tolist() for layer in sorted(sums.entropy)]
    distance = [
        (sums.distance[layer] / sums.mass[layer].sum(-1)).tolist()
        for layer in sorted(sums.distance)
    ]
    return AttentionMass(
        layers=layers,
        first_distances=first_distances(used),
        mass={part: mass_PINX[index, ..., :used].tolist() for index, part in enumerate(PARTS)},
        entropy=entropy,
        mean_distance=distance,
        uniform_entropy=sums.uniform / sums.queries,
        queries=sums.queries,
        memory_length=memory_length,
        compressed_length=compressed_length,
    )
