"""The list of steps, in the order in which a short time with a GPU should be spent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.findings import CPU, END, Finding
from foundation.errors import UserError

ROOT = Path(__file__).parents[2]
LONGEST_STEP = 480.0  # seconds: machines that are lent may end a command after ten minutes

_KERNELS = ("pretrain/kernels/triton", "pretrain/model/attention_backends.py")
_MODEL = ("pretrain/model", "pretrain/kernels/triton", "configs/models")
_TRAINING = (*_MODEL, "pretrain/engines", "pretrain/optim", "benchmarks/gpu/training.py")
_SPEED = (*_TRAINING, "benchmarks/gpu/speed.py")
_GPT = ("benchmarks/gpu/gpt.py",)


@dataclass(frozen=True)
class Step:
    """One step: `target`, "module:function", is called with a Context in a process of its own."""

    name: str
    target: str
    expected: float  # seconds on an H100; with less time left, it is not started
    limit: float  # seconds after which it is killed; its findings by then are kept
    purpose: str
    sources: tuple[str, ...]  # files and folders that decide what it finds
    case: str = ""

    @property
    def fingerprint(self) -> str:
        """A hash of the step's sources."""
        digest = hashlib.sha256()
        for source in self.sources:
            path = ROOT / source
            for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
                if file.suffix in (".py", ".yaml", ".json"):
                    digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:12]


def _speed(name: str, case: str, expected: float, purpose: str, *sources: str) -> Step:
    target = "benchmarks.gpu.speed:speed"
    return Step(name, target, expected, 180, purpose, sources or _SPEED, case)


STEPS = (
    _speed("speed-1b", "xl_modern_1b", 35, "tokens/s, MFU, memory and profile of xl_modern_1b"),
    _speed("speed-relative", "relative_1b", 35, "the same of 1.3B with relative attention"),
    _speed("speed-gpt-compiled", "gpt compiled", 45, "of a plain GPT, compiled", *_SPEED, *_GPT),
    _speed("speed-1b-compiled", "xl_modern_1b compiled", 45, "of xl_modern_1b, compiled"),
    _speed("speed-relative-compiled", "relative_1b compiled", 45, "of 1.3B, compiled"),
    _speed("speed-1b-atomic", "xl_modern_1b atomic", 45, "of it, compiled, sums in any order"),
    _speed("speed-gpt", "gpt", 25, "of a plain GPT, not compiled", *_SPEED, *_GPT),
    _speed("speed-hybrid", "xl_modern_1b hybrid", 60, "of three Gated DeltaNet layers in four"),
    _speed("speed-hybrid-compiled", "xl_modern_1b hybrid-compiled", 60, "of the same, compiled"),
    Step("attention", "benchmarks.gpu.attention:run", 60, 240,
         "four workspaces; FlashAttention-2, cuDNN, FlexAttention",
         (*_KERNELS, "benchmarks/gpu/attention.py")),
    Step("deltanet", "benchmarks.gpu.layers:deltanet", 20, 120,
         "a Gated DeltaNet layer with and without fla",
         ("pretrain/mixers/deltanet/module.py", "benchmarks/gpu/layers.py")),
    Step("evaluation", "benchmarks.gpu.layers:evaluation", 30, 120,
         "scored tokens/s of xl_modern_1b in bf16 and fp32", (*_MODEL, "benchmarks/gpu/layers.py")),
    Step("nvidia", "benchmarks.gpu.layers:nvidia", 20, 120,
         "NVIDIA's Transformer-XL of 16 layers and ours",
         (*_MODEL, "benchmarks/peer_sides.py", "benchmarks/gpu/layers.py")),
    Step("quality", "benchmarks.gpu.quality:run", 40, 240,
         "loss against the plain GPT at equal FLOPs and seconds",
         (*_TRAINING, *_GPT, "benchmarks/gpu/quality.py")),
    Step("tiles", "benchmarks.gpu.tiles:run", 300, 480, "the fastest tile of each kernel",
         (*_KERNELS, "benchmarks/gpu/tiles.py")),
    _speed("zero-0", "xl_modern_1b ZeRO 0", 35, "speed and memory of ZeRO 0"),
    _speed("zero-1", "xl_modern_1b ZeRO 1", 35, "of ZeRO 1"),
    _speed("zero-3", "xl_modern_1b ZeRO 3", 35, "of ZeRO 3"),
    _speed("offload", "xl_modern_1b offload", 60, "of the optimizer in host memory"),
    Step("resume", "benchmarks.gpu.resume:run", 90, 480,
         "bitwise resume: ZeRO 0 to 3, offload, compiled, hybrid",
         (*_TRAINING, "pretrain/checkpoint", "benchmarks/gpu/resume.py")),
)  # fmt: skip


def selected(names: str) -> list[Step]:
    """Return the steps of a comma-separated list, in their own order; all of them for "".

    The first part of a name selects all steps that share it.
    """
    wanted = {name for name in names.replace(" ", "").split(",") if name}
    known = {name for step in STEPS for name in _names(step)}
    if unknown := sorted(wanted - known):
        every = ", ".join(step.name for step in STEPS)
        raise UserError(f"found no step '{unknown[0]}', expected some of {every}")
    return [step for step in STEPS if not wanted or wanted & _names(step)]


def _names(step: Step) -> set[str]:
    return {step.name, step.name.partition("-")[0]}


def known_steps(findings: Iterable[Finding], device: str | None) -> set[str]:
    """Return the steps that have ended with today's code on this device, or on any GPU."""
    ended = {
        (finding.step, finding.fingerprint)
        for finding in findings
        if finding.part == END
        if finding.device == device or (device is None and finding.device != CPU)
    }
    return {step.name for step in STEPS if (step.name, step.fingerprint) in ended}
