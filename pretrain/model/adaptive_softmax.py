"""The output layer: a softmax over the vocabulary or, with `cutoffs`, the adaptive softmax (Grave et al. 2017).

The first bin's softmax covers its tokens (the shortlist) and one column per tail bin; bin i's column is the i-th from
the end, as in the original. T tokens (lanes times positions), D d_model, E the width of a bin, V a bin's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, log_softmax
from torch.utils.checkpoint import checkpoint

from pretrain.config.run import ModelConfig
from pretrain.model.embedding import Embedding, EmbeddingBin, bin_ranges, bin_width
from pretrain.model.parameters import normal, zeros


def at_least_float32(logits: Tensor) -> Tensor:
    """The logits in the precision of the loss: float32, or wider if they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def with_gradient_of(loss: Tensor, other: Tensor) -> Tensor:
    """`loss` to the last bit, whose gradient is that of `loss + other`: what is shown stays comparable."""
    return loss + (other - other.detach())


class OutputBin(nn.Module):
    """Logits [T, V + clusters] of one bin. The weight is the embedding's own parameter when embeddings are tied."""

    projection: nn.Parameter | None

    def __init__(self, config: ModelConfig, embedding: Embedding, index: int) -> None:
        super().__init__()
        tokens = len(bin_ranges(config)[index])
        width = bin_width(config, index)
        embedding_bin = embedding.bins[index]
        assert isinstance(embedding_bin, EmbeddingBin)
        self.weight = (
            embedding_bin.weight
            if config.tie_embeddings
            else normal(tokens, width, std=config.init_std)
        )
        self.bias = zeros(tokens)
        shared = (
            embedding.projection if embedding_bin.projection is None else embedding_bin.projection
        )
        if shared is None or config.ties_projection(index):
            self.projection = shared
        else:
            self.projection = normal(config.d_model, width, std=config.projection_init_std)
        self._num_clusters = 0 if index else len(config.cutoffs)
        if self._num_clusters:
            self.cluster_weight = normal(self._num_clusters, width, std=config.init_std)
            self.cluster_bias = zeros(self._num_clusters)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        hidden = hidden_TD if self.projection is None else linear(hidden_TD, self.projection.t())
        if not self._num_clusters:
            return linear(hidden, self.weight, self.bias)
        weight = torch.cat([self.weight, self.cluster_weight])
        return linear(hidden, weight, torch.cat([self.bias, self.cluster_bias]))


class AdaptiveSoftmax(nn.Module):
    """Negative log-likelihoods in token order; without cutoffs an ordinary softmax.

    With `chunk_tokens` training holds the logits of so many tokens at most: each chunk's are computed once more in the
    backward pass.
    """

    def __init__(self, config: ModelConfig, embedding: Embedding, chunk_tokens: int = 0) -> None:
        super().__init__()
        self._chunk_tokens = chunk_tokens
        self._ranges = bin_ranges(config)
        self._z_loss = config.z_loss
        self.bins = nn.ModuleList(
            OutputBin(config, embedding, index) for index in range(len(self._ranges))
        )

    def forward(self, hidden_BLD: Tensor, targets_BL: Tensor | None) -> Tensor:
        """NLL [B, L] of the targets in float32, or log-probabilities [B, L, vocabulary] when there are none."""
        hidden_TD = hidden_BLD.flatten(0, 1)
        if targets_BL is None:
            return self._log_probabilities(hidden_TD).unflatten(0, hidden_BLD.shape[:2])
        return self._chunked_nll(hidden_TD, targets_BL.flatten()).view(targets_BL.shape)

    def _chunked_nll(self, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
        size = self._chunk_tokens or len(targets_T)
        if size >= len(targets_T):
            return self._nll(hidden_TD, targets_T)
        chunks = zip(hidden_TD.split(size), targets_T.split(size), strict=True)
        return torch.cat([self._recomputed_nll(*chunk) for chunk in chunks])

    def _recomputed_nll(self, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._nll(hidden_TD, targets_T)
        nll_T = checkpoint(
            self._nll, hidden_TD, targets_T, use_reentrant=False, preserve_rng_state=False
        )
        assert isinstance(nll_T, Tensor)
        return nll_T

    def _nll(self, hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
        head_targets_T = targets_T
        for index, tokens in enumerate(self._ranges[1:], start=1):
            in_bin_T = (targets_T >= tokens.start) & (targets_T < tokens.stop)
            head_targets_T = head_targets_T.masked_fill(in_bin_T, self._cluster_column(index))
        nll_T = self._cross_entropy(self.bins[0](hidden_TD), head_targets_T)
        for index, tokens in enumerate(self._ranges[1:], start=1):
            chosen = ((targets_T >= tokens.start) & (targets_T < tokens.stop)).nonzero().flatten()
            # Also with no token chosen: every rank must run every bin, because ZeRO-3 gathers parameters in step.
            tail_nll = self._cross_entropy(
                self.bins[index](hidden_TD[chosen]), targets_T[chosen] - tokens.start
            )
            nll_T = nll_T.index_add(0, chosen, tail_nll)
        return nll_T

    def _cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """NLL [T]; with z-loss (Chowdhery et al. 2022) the gradient also draws log(sum of exp(logits)) towards zero."""
        logits_TV = at_least_float32(logits_TV)
        nll_T = cross_entropy(logits_TV, targets_T, reduction="none")
        if not self._z_loss or not torch.is_grad_enabled():
            return nll_T
        return with_gradient_of(nll_T, self._z_loss * logits_TV.logsumexp(1).square())

    def _log_probabilities(self, hidden_TD: Tensor) -> Tensor:
        head = log_softmax(at_least_float32(self.bins[0](hidden_TD)), dim=1)
        parts = [head[:, : len(self._ranges[0])]]
        for index in range(1, len(self._ranges)):
            tail = log_softmax(at_least_float32(self.bins[index](hidden_TD)), dim=1)
            parts.append(head[:, self._cluster_column(index), None] + tail)
        return torch.cat(parts, dim=1)

    def _cluster_column(self, index: int) -> int:
        return len(self._ranges[0]) + len(self._ranges) - 1 - index
