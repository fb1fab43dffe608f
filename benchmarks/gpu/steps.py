"""The list of steps, in the order in which a short time with a GPU should be spent."""

from __future__ import annotations

from dataclasses import dataclass

from foundation.errors import UserError

LONGEST_STEP = 480.0  # seconds: machines that are lent may end a command after ten minutes


@dataclass(frozen=True)
class Step:
    """One step: `target`, "module:function", is called with a Context in a process of its own."""

    name: str
    target: str
    expected: float  # seconds on an H100; without as many left, no command starts it
    limit: float  # seconds after which it is killed; what it has found by then is kept
    purpose: str


STEPS = (
    Step("environment", "benchmarks.gpu.environment:run", 15, 120, "what this machine has"),
    Step("kernels", "benchmarks.gpu.kernels:run", 140, 300, "fused attention against float64"),
    Step("determinism", "benchmarks.gpu.exactness:determinism", 30, 240, "the same bits twice"),
    Step("stages", "benchmarks.gpu.exactness:stages", 80, 480, "DeepSpeed: save and restore"),
    Step("resume", "benchmarks.gpu.exactness:resume", 130, 480, "verify-resume, ZeRO 0 to 3"),
    Step("memory", "benchmarks.gpu.cost:memory", 90, 300, "peak memory against `describe`"),
    Step("attention", "benchmarks.gpu.speed:run", 120, 300, "fused attention against flash"),
    Step("mfu", "benchmarks.gpu.cost:mfu", 150, 480, "training step of a 1.3B model"),
    Step("profile", "benchmarks.gpu.cost:profile", 60, 240, "the ten costliest kernels of it"),
    Step("training", "benchmarks.gpu.long_run:run", 150, 480, "100M parameters, killed midway"),
    Step("tiles", "benchmarks.gpu.tiles:run", 300, 480, "the fastest tile of each kernel"),
)


def selected(names: str) -> list[Step]:
    """Return the steps of a comma-separated list, in their own order; all of them for ""."""
    wanted = [name for name in names.replace(" ", "").split(",") if name]
    known = [step.name for step in STEPS]
    for name in wanted:
        if name not in known:
            raise UserError(f"found no step '{name}', expected some of {', '.join(known)}")
    return [step for step in STEPS if not wanted or step.name in wanted]
