"""The learning rate: a pure function of the step, so a resumed run needs no scheduler state."""

import math

from foundation.settings import assert_never
from pretrain.config.run import OptimConfig


def learning_rate_at(optim: OptimConfig, step: int) -> float:
    """Return the learning rate of the update from `step` to `step + 1`; `step` starts at 0."""
    schedule = optim.schedule
    if step < schedule.warmup_steps:
        return optim.learning_rate * (step + 1) / schedule.warmup_steps
    return optim.learning_rate * _fraction_after_warmup(optim, step)


def _fraction_after_warmup(optim: OptimConfig, step: int) -> float:
    schedule = optim.schedule
    floor = schedule.final_fraction
    done = (step - schedule.warmup_steps) / max(1, optim.steps - schedule.warmup_steps)
    done = min(1.0, max(0.0, done))
    match schedule.shape:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1.0 - floor) * (1.0 - done)
        case "cosine":
            return _cosine(floor, done)
        case "cosine_from_start":  # PyTorch code of Dai et al. 2019; their TensorFlow has "cosine"
            return _cosine(floor, min(1.0, step / optim.steps))
        case "inverse_sqrt":
            return max(floor, math.sqrt(max(1, schedule.warmup_steps) / max(1, step + 1)))
        case "wsd":  # warm-up, stable, decay: constant, then linear over the last `decay_steps`
            left = max(0, optim.steps - step)
            return floor + (1.0 - floor) * min(1.0, left / optim.decay_steps)
        case _:
            assert_never(schedule.shape)


def _cosine(floor: float, done: float) -> float:
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
