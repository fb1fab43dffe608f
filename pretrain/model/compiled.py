"""How functions of a model run in training: compiled by torch, or again in the backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from foundation.errors import ConfigError

MOST_COMPILED = 64  # shapes of a layer's rows; each takes about a minute
_compiled = functools.cache(functools.partial(torch.compile, fullgraph=True, dynamic=False))


def compiled_if(compiles: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled in training: evaluation has batches of any length.

    Attention is between compiled functions, so that no graph breaks at a kernel of ours.
    """
    if not (compiles and torch.is_grad_enabled()):
        return function
    return functools.partial(_run_compiled, function)


def recomputed_if(recomputes: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, whose activations are computed again in a backward pass that needs them.

    Random states are not restored: dropout masks are functions of the step (`DropoutStream`).
    """
    if not (recomputes and torch.is_grad_enabled()):
        return function
    return functools.partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def _run_compiled(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    from torch._dynamo.exc import FailOnRecompileLimitHit  # loads torch's compiler

    # Torch compiles anew for each length of a filling memory, once for all layers.
    torch._dynamo.config.recompile_limit = MOST_COMPILED
    try:
        return _compiled(function)(*inputs, **options)
    except FailOnRecompileLimitHit:
        raise ConfigError(
            f"engine.compile=true: found more than {MOST_COMPILED} shapes of a layer's rows, "
            "expected few lengths while memory fills; use longer segments, or do not compile"
        ) from None
