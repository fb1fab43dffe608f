"""One layer of the model: a mixer of tokens and feed-forward, with norms and residuals.

A mixer reads remembered rows, as attention does, or it carries a state: a class of layers for each.
Letters of shapes as in `pretrain.model`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from foundation.errors import ConfigError
from pretrain.config.mixer import imported, mixer_facts
from pretrain.config.model import AttentionKernel, ModelConfig
from pretrain.model.attention_backends import ScoreTerms
from pretrain.model.compiled import compiled_if
from pretrain.model.dropout import DropoutStream, Site, drop
from pretrain.model.feed_forward import FeedForward
from pretrain.model.parameters import Norm, new_norm
from pretrain.model.visibility import Visibility


def mixer_class(kind: str) -> Any:
    """Return the module's class of a kind of layer."""
    facts = mixer_facts(kind)
    module = imported(f"{facts.package}.module")
    if not hasattr(module, facts.module):
        raise ConfigError(f"{module.__file__}: found no {facts.module}, which the facts name")
    return getattr(module, facts.module)


def check_facts(config: ModelConfig, kind: str, mixer: nn.Module) -> None:
    """Raise ConfigError unless the mixer has exactly the parameters that its facts name."""
    facts = {name: weight.shape for name, weight in mixer_facts(kind).weights(config).items()}
    # Under ZeRO-3 a parameter is an empty vector between its uses; `ds_shape` has its shape.
    built = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in mixer.named_parameters()
    }
    if wrong := sorted(name for name in facts | built if facts.get(name) != built.get(name)):
        name = wrong[0]
        raise ConfigError(
            f"layers of kind {kind}: {name} has shape {built.get(name)} in the module and "
            f"{facts.get(name)} in the facts; make `weights` of the facts agree"
        )


class ResidualLayer(nn.Module):
    """What layers of all kinds have: norms after (post) or before (pre) each part, feed-forward."""

    def __init__(self, config: ModelConfig, layer: int, kernel: AttentionKernel) -> None:
        super().__init__()
        self._norms_inputs = config.norm_position == "pre"
        # Whether to compile, in training, what lies between two attentions.
        self.compiles = False
        self._kind = config.kinds[layer]  # also the mixer's name in names of parameters
        self.add_module(self._kind, mixer_class(self._kind)(config, layer, kernel))
        check_facts(config, self._kind, self.mixer)
        self.attention_norm = new_norm(config)
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = new_norm(config)

    @property
    def mixer(self) -> Any:
        """The part where tokens read each other."""
        return getattr(self, self._kind)

    def _completed(
        self, hidden_BLD: Tensor, attended_BLD: Tensor, dropout: DropoutStream | None
    ) -> Tensor:
        """Add residuals, norms and the feed-forward layer to what the mixer read."""
        hidden_BLD = hidden_BLD + attended_BLD
        if self._norms_inputs:
            normed_BLD = self.feed_forward_norm(hidden_BLD)
            return hidden_BLD + self.feed_forward(normed_BLD, dropout=dropout)
        hidden_BLD = self.attention_norm(hidden_BLD)
        return self.feed_forward_norm(hidden_BLD + self.feed_forward(hidden_BLD, dropout=dropout))

    def _normed(self, hidden_BLD: Tensor) -> Tensor:
        return self.attention_norm(hidden_BLD) if self._norms_inputs else hidden_BLD

    @property
    def input_norm(self) -> Norm | None:
        """The norm that segment and memory pass before attention, if any."""
        return self.attention_norm if self._norms_inputs else None


class StateLayer(ResidualLayer):
    """A layer that carries what its mixer returns: states of fixed size."""

    def __init__(self, config: ModelConfig, layer: int, kernel: AttentionKernel) -> None:
        super().__init__(config, layer, kernel)
        self._layer, self._rate = layer, config.dropout

    def forward(
        self,
        hidden_BLD: Tensor,
        *inputs: Tensor | None,
        dropout: DropoutStream | None,
        carries_gradient: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return the layer's output and the parts after it, detached unless `carries_gradient`.

        `inputs` are the parts before it and the tokens' documents, counted from the token before
        the segment; None: all tokens belong to one document.
        """
        segment_BLD = compiled_if(self.compiles, ResidualLayer._normed)(self, hidden_BLD)
        read_BLD, *parts = self.mixer(segment_BLD, *inputs)
        if len(parts) != (count := len(inputs) - 1):
            raise ConfigError(
                f"layers of kind {self._kind} returned {len(parts)} of {count} states"
            )
        read_BLD = drop(read_BLD, self._rate, dropout, Site.ATTENTION_OUTPUT, self._layer)
        completed = compiled_if(self.compiles, ResidualLayer._completed)
        output_BLD = completed(self, hidden_BLD, read_BLD, dropout)
        own = map(_owned, parts)
        return output_BLD, *(part if carries_gradient else part.detach() for part in own)


def _owned(part: Tensor) -> Tensor:
    """Return the part without what else its memory holds, as of a slice of the whole segment."""
    return part if part.untyped_storage().size() == part.nbytes else part.clone()


class RowsLayer(ResidualLayer):
    """A layer whose mixer reads remembered inputs of the layer: attention."""

    def forward(
        self,
        hidden_BLD: Tensor,
        memory_BMD: Tensor,
        *positions: Tensor | None,
        visibility: Visibility,
        dropout: DropoutStream | None,
    ) -> Tensor:
        """Return the layer's output; `positions` are positions, u and v of the mixer's `inputs`."""
        attended_BLD = self.mixer(
            hidden_BLD,
            memory_BMD,
            *positions,
            norm=self.input_norm,
            visibility=visibility,
            dropout=dropout,
        )
        completed = compiled_if(self.compiles, ResidualLayer._completed)
        return completed(self, hidden_BLD, attended_BLD, dropout)

    def read_cached(
        self,
        hidden_BLD: Tensor,
        remember: Callable[[Tensor], Tensor],
        positions_CX: Tensor,
        terms: ScoreTerms,
        *,
        visibility: Visibility,
    ) -> Tensor:
        """Apply the layer without dropout, with a cache of keys and values as the memory.

        `remember` takes the keys and values of the segment, [B, L, 2, G, H], and returns them
        for memory and segment.
        """
        segment_BLD = self._normed(hidden_BLD)
        key_values = remember(self.mixer.keys_and_values(segment_BLD))
        attended_BLD = self.mixer.read(
            self.mixer.queries(self.mixer.projected_queries(segment_BLD), positions_CX, visibility),
            [self.mixer.placed(key_values, positions_CX)],
            terms,
            visibility=visibility,
            dropout=None,
        )
        return self._completed(hidden_BLD, attended_BLD, None)


def new_layer(config: ModelConfig, layer: int, kernel: AttentionKernel) -> RowsLayer | StateLayer:
    """Return a new layer, counted from 0, of the configured kind."""
    has_rows = config.mixer(layer).has_rows
    return RowsLayer(config, layer, kernel) if has_rows else StateLayer(config, layer, kernel)
