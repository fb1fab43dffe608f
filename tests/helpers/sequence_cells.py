"""Ranks that share lanes against one that has them alone; in a process of its own, which forks.

    python -m tests.helpers.sequence_cells CORPUS OUTPUT

OUTPUT/NAME.json has the losses of the cell NAME, OUTPUT/models.json by how much models in float64
differ, OUTPUT/RUN is a run of `pretrain train`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.config.choices import AttentionKernel
from pretrain.config.data import DataConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.run import RunConfig
from pretrain.costs.sequence_exchange import exchanged_bytes
from pretrain.distributed.sequence import SequenceShare
from pretrain.distributed.world import destroy_process_group, init_world, sharing_lanes
from pretrain.model.dropout import DropoutStream
from pretrain.model.lane_state import Memory
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.engine_worker import train_rank
from tests.helpers.forked_ranks import fork_ranks, import_everything
from tests.helpers.local_tier import Runs

LANES, LENGTH, SEGMENTS = 3, 8, 3
MODEL: dict[str, Any] = {
    "vocab_size": 50,
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 4,
    "memory_length": 12,
    "norm_position": "pre",
}


@dataclass(frozen=True)
class Case:
    """A model, and how many ranks share its lanes."""

    model: dict[str, Any]
    places: int = 2
    kernel: AttentionKernel = "auto"
    segments_of_step: int = 1


# Of the positions each kind, with what else belongs to heads, rows or lengths.
CASES = {
    "relative": Case({"untie_biases": True, "isolate_documents": True}, places=4),
    "rope": Case(
        {
            "positions": "rope",
            "num_key_heads": 2,
            "query_key_norm": True,
            "attention_sinks": True,
            "softmax_scaling": "log_length",
            "isolate_documents": True,
        }
    ),
    "alibi": Case({"positions": "alibi", "memory_length": (12, 4), "same_length": True}, 4),
    "t5": Case({"positions": "t5", "cutoffs": (10, 30), "div_val": 2, "num_key_heads": 2}),
    "dropout": Case({"dropout": 0.2, "attention_dropout": 0.2}, 4, "plain"),
    "gradient segments": Case({"dropout": 0.2, "z_loss": 1e-3}, segments_of_step=2),
}


def differences_of(case: Case, rank: int, share: SequenceShare) -> dict[str, float]:
    """Return the largest differences from a model that has the lanes alone.

    Also what is `sent` in the last step, and what `exchanged_bytes` expects.
    """
    torch.manual_seed(1)
    model = TransformerXL(ModelConfig(**{**MODEL, **case.model}), attention_kernel=case.kernel)
    model = model.double()
    alone, memory = _trained(model, case, None)
    sent = _Sent()
    with sent:
        shared, own_memory = _trained(model, case, share, sent)
    for gradient in shared[1:]:
        dist.all_reduce(gradient, group=share.group)
    expected = [share.own_rows(alone[0]), *alone[1:]]
    names = ["losses", *(name for name, _ in model.named_parameters())]
    found = {
        name: float((ours - theirs).abs().max())
        for name, ours, theirs in zip(names, shared, expected, strict=True)
    }
    *rows, documents = memory
    *own_rows, own_documents = own_memory
    assert torch.equal(documents, own_documents)
    of_rows = zip(rows, own_rows, strict=True)
    found["memory"] = max(float((share.own_rows(a) - b).abs().max()) for a, b in of_rows)
    return {**found, "sent": sent.bytes, "expected": _expected_bytes(case)}


def _trained(
    model: TransformerXL,
    case: Case,
    share: SequenceShare | None,
    sent: _Sent | None = None,
) -> tuple[list[Tensor], Memory]:
    """Return the losses of the last segments, gradients of all, and the memory."""
    generator = torch.Generator().manual_seed(2)
    model.zero_grad()
    memory, nll_BL = None, torch.empty(0)
    for step in range(SEGMENTS):
        if sent is not None:
            sent.bytes = 0.0
        shape = (LANES, LENGTH * case.segments_of_step)
        tokens_BL, targets_BL = torch.randint(50, (2, *shape), generator=generator)
        starts_BL = torch.rand(shape, generator=generator) < 0.2
        masks = DropoutStream(3, step, range(5, 5 + LANES), share)
        nll_BL, memory = model(
            *(tokens_BL, targets_BL, memory, starts_BL),
            dropout=masks,
            num_segments=case.segments_of_step,
            sequence=share,
        )
        # Losses that count unequally: a mean would not show exchanged rows.
        weights_BL = torch.rand(shape, generator=generator)
        own_BL = weights_BL if share is None else share.own_rows(weights_BL)
        (nll_BL * own_BL).sum().backward()
    assert memory is not None
    gradients = [parameter.grad for parameter in model.parameters()]
    return [nll_BL.detach(), *(each.clone() for each in gradients if each is not None)], memory


class _Sent:
    """Counts what a rank sends to others in the exchanges of a block."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self._exchange: Callable[..., Any] = dist.all_to_all_single

    def __enter__(self) -> None:
        def counted(found: Tensor, sent: Tensor, *sizes: Any, group: Any) -> None:
            ranks = dist.get_world_size(group)
            self.bytes += sent.numel() * sent.element_size() * (ranks - 1) / ranks
            self._exchange(found, sent, *sizes, group=group)

        dist.all_to_all_single = counted

    def __exit__(self, *error: object) -> None:
        dist.all_to_all_single = self._exchange


def _expected_bytes(case: Case) -> float:
    run = RunConfig(
        model=ModelConfig(**{**MODEL, **case.model}),
        optim=OptimConfig(gradient_segments=case.segments_of_step),
        data=DataConfig(lanes=LANES, segment_length=LENGTH),
        engine=EngineConfig(sequence_ranks=case.places, precision="fp32", attention_kernel="plain"),
    )
    return 2 * exchanged_bytes(run, case.places)  # in float64


def compare_models(output: Path) -> int:
    """A rank's part in all cases; rank 0 writes what it finds."""
    torch.set_num_threads(1)
    world = init_world()
    found = {}
    for name, case in CASES.items():
        share = sharing_lanes(world, case.places).sequence
        assert share is not None
        found[name] = differences_of(case, world.rank, share)
    (output / f"models-{world.rank}.json").write_text(json.dumps(found))
    destroy_process_group()
    return 0


def cell(name: str, ranks: int, shared_by: int = 1, **more: Any) -> dict[str, Any]:
    """A cell as the engine tests have them, with ZeRO stage, model and what else is in `more`."""
    engine = {
        "zero_stage": more.pop("stage", 2),
        "precision": more.pop("precision", "fp32"),
        "activation_checkpointing": more.pop("checkpointing", "none"),
        "micro_batch_lanes": 2,
        "attention_kernel": "plain",
        "sequence_ranks": shared_by,
    }
    model = {"num_heads": 4, "num_key_heads": 4, "isolate_documents": True, **more.pop("model", {})}
    return {"name": name, "ranks": ranks, "engine": engine, "model": model, "save_at": [], **more}


# (ranks, that share lanes, ZeRO stage, last step)
CHAIN = ((2, 2, 1, 3), (4, 2, 3, 6), (1, 1, 0, 8), (4, 4, 2, 10))
END = CHAIN[-1][-1]
FEW = {"lanes": 2, "checkpointing": "full"}
ROUNDED = {"precision": "bf16", "model": {"positions": "rope", "num_key_heads": 2}, "until": 6}


def chain_cells() -> list[dict[str, Any]]:
    """The run in one go, then the chain; each link saves what it loaded before its first step."""
    cells = [cell("whole", 1, stage=0, until=END, save_at=[END])]
    begin = 0
    for ranks, shared_by, stage, end in CHAIN:
        name = f"{ranks}-ranks-{shared_by}-share"
        link = cell(name, ranks, shared_by, stage=stage, until=end, save_at=[end])
        if begin:
            link |= {"resume": cells[-1]["name"], "save_at": [begin, end]}
        cells.append(link)
        begin = end
    return cells


def all_cells() -> list[dict[str, Any]]:
    first, further = chain_cells()[1], {"until": 6, "save_at": [6], "stage": 1}
    return [
        *chain_cells(),
        # The first link for longer, in one go and resumed.
        cell("through", 2, 2, **further),
        cell("resumed", 2, 2, resume=first["name"], **further),
        # Fewer lanes than ranks that share them: not every rank has one to save.
        cell("few-alone", 1, stage=0, until=4, **FEW),
        cell("few", 4, 4, stage=3, until=2, **FEW | {"save_at": [2]}),
        cell("few-resumed", 4, 2, stage=3, until=4, resume="few", **FEW),
        cell("rounded-alone", 1, stage=1, **ROUNDED),
        cell("rounded", 2, 2, stage=3, checkpointing="full", **ROUNDED),
    ]


SHARED = ("engine.sequence_ranks=2", "engine.attention_kernel=plain", "metrics.interval=1")
# Weights that stand still, large enough that memories matter at once.
REBUILT = ("checkpoint.memories_interval=0", "checkpoint.local=null", "optim.learning_rate=1e-12")
REBUILT = (*REBUILT, "model.init_std=0.2")


def run_all(corpus: Path, output: Path) -> None:
    """Train all cells and runs."""
    runs = Runs(corpus, output)
    _forked(4, lambda: compare_models(output), output)
    for each in all_cells():
        _forked(each["ranks"], lambda each=each: train_rank(corpus, output, [each]), output)
    runs.train("alone", *SHARED, "engine.sequence_ranks=1", ranks=1)
    runs.train("shared", *SHARED, killed_at=9)  # resumed from the nodes' disks
    runs.train("shared", *SHARED)
    runs.train("rebuilt", *SHARED, *REBUILT, killed_at=8)
    shutil.copy(output / "rebuilt" / "metrics.jsonl", output / "before.jsonl")
    runs.train("rebuilt", *SHARED, *REBUILT)


def _forked(num_ranks: int, program: Callable[[], int], output: Path) -> None:
    pids = fork_ranks(num_ranks, program, output)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(statuses):
        raise SystemExit(f"ranks ended with {statuses}; see {output}")


if __name__ == "__main__":
    import_everything()
    run_all(Path(sys.argv[1]), Path(sys.argv[2]))
