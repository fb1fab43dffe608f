"""Both ends of the model: the token embedding and the output softmax, in bins if `cutoffs` are set.

With `cutoffs` these are the adaptive embedding and the adaptive softmax (Grave et al. 2017; Baevski
and Auli 2019) as in the original code: the first bin is the shortlist of frequent tokens, later
bins may be narrower. The first bin's softmax covers its tokens and one column per tail bin; the
column of bin i is the i-th from the end.

`GradientSums` adds in float32 the gradients of a parameter that several chunks of a forward pass
use. Autograd would add each chunk's gradient to a sum in bf16. That sum is soon so much larger than
the next gradient that most of the gradient is rounded away: the error grows with the number of
chunks. The sum in float32 is rounded once, at the end.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, log_softmax

from pretrain.config.model import ModelConfig
from pretrain.model.compiled import recomputed_if
from pretrain.model.parameters import normal, zeros
from pretrain.model.token_losses import at_least_float32, token_losses


class GradientSums:
    """The gradient sums of one forward pass; each of its parts uses each parameter once."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._totals: dict[Tensor, _Total] = {}

    def shared(self, parameter: Tensor) -> Tensor:
        """Return the parameter for one part; its gradient arrives once all have added theirs."""
        if self._num_parts == 1 or torch.finfo(parameter.dtype).bits >= 32:
            return parameter
        total = self._totals.setdefault(parameter, _Total(self._num_parts))
        shared = _Shared.apply(parameter, total)
        assert isinstance(shared, Tensor)
        return shared


class _Total:
    """The sum of the gradients so far, and how many are missing."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = self._missing = num_parts
        self._sum: Tensor | None = None

    def plus(self, gradient: Tensor) -> Tensor | None:
        """Add a gradient; return the sum after the last one, else None, which autograd ignores."""
        self._sum = gradient.float() if self._sum is None else self._sum.add_(gradient)
        self._missing -= 1
        if self._missing:
            return None
        complete, self._sum, self._missing = self._sum, None, self._num_parts
        return complete.to(gradient.dtype)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: _Total) -> Tensor:  # type: ignore[override]
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.total.plus(gradient), None


def bin_ranges(config: ModelConfig) -> list[range]:
    """Return the tokens of each bin: the shortlist, then one bin per cutoff."""
    return [range(first, last) for first, last in pairwise((0, *config.cutoffs, config.vocab_size))]


def bin_width(config: ModelConfig, index: int) -> int:
    """Return E of bin `index`: d_embed divided by div_val once for every bin before it."""
    return config.embedding_width // config.div_val**index


class EmbeddingBin(nn.Module):
    """The vectors of one bin's tokens, with a projection to d_model if `div_val` exceeds 1."""

    projection: nn.Parameter | None

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        width = bin_width(config, index)
        self.weight = normal(len(bin_ranges(config)[index]), width, std=config.init_std)
        self.projection = None
        if config.div_val > 1:
            self.projection = normal(config.d_model, width, std=config.projection_std)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        vectors_BLE = embedding(tokens_BL, self.weight)
        return vectors_BLE if self.projection is None else linear(vectors_BLE, self.projection)


class Embedding(nn.Module):
    """Vectors [B, L, D] times sqrt(D of muP's base); with `div_val` 1 bins share a projection."""

    projection: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._ranges = bin_ranges(config)
        self._scale = config.embedding_scale
        self.bins = nn.ModuleList(EmbeddingBin(config, index) for index in range(len(self._ranges)))
        self.projection = None
        width = config.embedding_width
        if config.div_val == 1 and width != config.d_model:
            self.projection = normal(config.d_model, width, std=config.projection_std)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        vectors = self.bins[0](tokens_BL) if len(self.bins) == 1 else self._binned(tokens_BL)
        if self.projection is not None:
            vectors = linear(vectors, self.projection)
        return vectors * self._scale

    def _binned(self, tokens_BL: Tensor) -> Tensor:
        # Every bin looks up every token, clamped into its range. So the device never waits for a
        # count of tokens, and every rank runs every bin: ZeRO-3 gathers parameters module by
        # module, in the same order on all ranks.
        vectors = None
        for tokens, bin_module in zip(self._ranges, self.bins, strict=True):
            in_bin_BL1 = ((tokens_BL >= tokens.start) & (tokens_BL < tokens.stop))[:, :, None]
            looked_up = bin_module((tokens_BL - tokens.start).clamp(0, len(tokens) - 1))
            vectors = looked_up if vectors is None else torch.where(in_bin_BL1, looked_up, vectors)
        assert vectors is not None
        return vectors


class OutputBin(nn.Module):
    """Logits [T, V + clusters] of one bin; the weight is the embedding's parameter if tied."""

    projection: nn.Parameter | None

    def __init__(self, config: ModelConfig, embedding: Embedding, index: int) -> None:
        super().__init__()
        num_tokens, width = len(bin_ranges(config)[index]), bin_width(config, index)
        embedding_bin = embedding.bins[index]
        assert isinstance(embedding_bin, EmbeddingBin)
        if config.tie_embeddings:
            self.weight = embedding_bin.weight
        else:
            self.weight = normal(num_tokens, width, std=config.init_std)
        self.bias = zeros(num_tokens)
        own = embedding_bin.projection
        shared = embedding.projection if own is None else own
        if shared is None or config.ties_projection(index):
            self.projection = shared
        else:
            self.projection = normal(config.d_model, width, std=config.projection_std)
        self._num_clusters = 0 if index else len(config.cutoffs)
        if self._num_clusters:
            self.cluster_weight = normal(self._num_clusters, width, std=config.init_std)
            self.cluster_bias = zeros(self._num_clusters)

    def forward(self, hidden_TD: Tensor, *, sums: GradientSums | None = None) -> Tensor:
        """Return the logits of a chunk; `sums` belong to all chunks of the batch."""
        shared = (sums or GradientSums(1)).shared
        hidden = hidden_TD
        if self.projection is not None:
            hidden = linear(hidden_TD, shared(self.projection).t())
        weight, bias = shared(self.weight), shared(self.bias)
        if self._num_clusters:
            weight = torch.cat([weight, shared(self.cluster_weight)])
            bias = torch.cat([bias, shared(self.cluster_bias)])
        return linear(hidden, weight, bias)


class AdaptiveSoftmax(nn.Module):
    """Negative log-likelihoods in token order; without cutoffs an ordinary softmax.

    With `chunk_tokens`, training holds the logits of at most that many tokens at a time; the
    backward pass computes each chunk's logits again. Gradients are summed over chunks in float32.
    """

    def __init__(self, config: ModelConfig, embedding: Embedding, chunk_tokens: int = 0) -> None:
        super().__init__()
        self.compiles = False
        self._chunk_tokens = chunk_tokens
        self._ranges = bin_ranges(config)
        self._z_loss = config.z_loss
        self._output_scale = config.output_scale
        self.bins = nn.ModuleList(
            OutputBin(config, embedding, index) for index in range(len(self._ranges))
        )

    def forward(self, hidden_BLD: Tensor, targets_BL: Tensor | None) -> Tensor:
        """Return the NLL [B, L] of the targets in float32; without targets, log-probabilities."""
        hidden_TD = hidden_BLD.flatten(0, 1)
        if self._output_scale != 1.0:
            hidden_TD = hidden_TD * self._output_scale  # scales logits, but not their biases
        if targets_BL is None:
            return self._log_probabilities(hidden_TD).unflatten(0, hidden_BLD.shape[:2])
        targets_T = targets_BL.flatten()
        if targets_T.is_cpu and len(targets_T):  # on a GPU the host would have to wait for it
            self._refuse_unknown(*targets_T.aminmax())
        size = self._chunk_tokens or len(targets_T)
        nll = recomputed_if(size < len(targets_T), self._nll)
        chunks = list(zip(hidden_TD.split(size), targets_T.split(size), strict=True))
        sums = GradientSums(len(chunks))
        return torch.cat([nll(*chunk, sums) for chunk in chunks]).view(targets_BL.shape)

    def _refuse_unknown(self, lowest: Tensor, highest: Tensor) -> None:
        """Raise IndexError unless all targets are tokens; no value means a target to ignore."""
        known = range(self._ranges[-1].stop)
        for target in (int(lowest), int(highest)):
            if target not in known:
                raise IndexError(f"found the target {target}, expected a token below {len(known)}")

    def _nll(self, hidden_TD: Tensor, targets_T: Tensor, sums: GradientSums) -> Tensor:
        head_targets_T = targets_T
        for index, tokens in enumerate(self._ranges[1:], start=1):
            in_bin_T = (targets_T >= tokens.start) & (targets_T < tokens.stop)
            head_targets_T = head_targets_T.masked_fill(in_bin_T, self._cluster_column(index))
        nll_T = self._cross_entropy(self.bins[0](hidden_TD, sums=sums), head_targets_T)
        for index, tokens in enumerate(self._ranges[1:], start=1):
            chosen = ((targets_T >= tokens.start) & (targets_T < tokens.stop)).nonzero().flatten()
            # Runs even if no token is in the bin: under ZeRO-3 every rank must run every module.
            tail_nll = self._cross_entropy(
                self.bins[index](hidden_TD[chosen], sums=sums), targets_T[chosen] - tokens.start
            )
            nll_T = nll_T.index_add(0, chosen, tail_nll)
        return nll_T

    def _cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        # Tails have other numbers of tokens in each batch.
        compiles = self.compiles and len(self._ranges) == 1
        return token_losses(logits_TV, targets_T, self._z_loss, compiles)

    def _log_probabilities(self, hidden_TD: Tensor) -> Tensor:
        head = log_softmax(at_least_float32(self.bins[0](hidden_TD)), dim=1)
        parts = [head[:, : len(self._ranges[0])]]
        for index in range(1, len(self._ranges)):
            tail = log_softmax(at_least_float32(self.bins[index](hidden_TD)), dim=1)
            parts.append(head[:, self._cluster_column(index), None] + tail)
        return torch.cat(parts, dim=1)

    def _cluster_column(self, index: int) -> int:
        return len(self._ranges[0]) + len(self._ranges) - 1 - index
