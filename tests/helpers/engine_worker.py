"""Ranks that train the cells of the engine tests in turn.

Each cell names settings, where to stop, and optionally a directory of checkpoints to resume from.
Rank 0 writes OUTPUT/CELL.json with the loss and gradient norm of every step as hexadecimal floats.
A cell may have faults injected; exactly the steps in `skips` are to be skipped, without changing a
bit.
"""

import dataclasses
import json
import pickle
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from foundation.errors import UserError
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.load import load_fragments
from pretrain.checkpoint.replicas import replicated_values
from pretrain.checkpoint.resume_point import find_resume_point
from pretrain.checkpoint.verify import latest_step
from pretrain.config.run import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    OptimConfig,
    RecoveryConfig,
    RunConfig,
    ScheduleConfig,
    accumulation_steps,
    lanes_of_rank,
)
from pretrain.distributed.collectives import gather_values, sum_over_ranks
from pretrain.distributed.messages import gather_rows
from pretrain.distributed.world import World, destroy_process_group, init_world
from pretrain.engines import engine as engines
from pretrain.engines.engine import Engine, StepResult
from pretrain.errors import CheckpointError
from pretrain.evaluation.training_evaluation import training_evaluator
from pretrain.model.memory import MemoryLayout
from pretrain.optim.parameter_groups import layer_metrics, layer_name
from pretrain.optim.schedule import learning_rate_at
from pretrain.recovery.faults import Fault
from pretrain.recovery.faulty_engine import with_fault
from pretrain.run import build_engine
from pretrain.state import TrainState, memories_without

MODEL: dict[str, Any] = {
    "vocab_size": 257, "num_layers": 2, "d_model": 32, "num_heads": 2, "memory_length": 12,
    "dropout": 0.1, "attention_dropout": 0.1, "norm_position": "pre",
}  # fmt: skip
OPTIM: dict[str, Any] = {"steps": 20, "learning_rate": 3e-3, "weight_decay": 0.1, "clip_norm": 0.5}
OPTIM["schedule"] = ScheduleConfig(warmup_steps=5)


def run_of_cell(corpus: Path, cell: dict[str, Any]) -> RunConfig:
    """Return a tiny run with dropout and a low clip_norm.

    "zero" of its engine is merged into DeepSpeed's zero_optimization; "loss_scale" is
    `train_cell`'s.
    """
    settings = cell["engine"]
    own = {name: each for name, each in settings.items() if name not in ("zero", "loss_scale")}
    zero = {"stage3_param_persistence_threshold": 0, **settings.get("zero", {})}
    return RunConfig(
        seed=5,
        model=ModelConfig(**{**MODEL, **cell.get("model", {})}),
        data=DataConfig(path=corpus, lanes=cell.get("lanes", 8), segment_length=8),
        optim=OptimConfig(**{**OPTIM, **cell.get("optim", {})}),
        engine=EngineConfig(deepspeed_extra={"zero_optimization": zero}, **own),
        checkpoint=CheckpointConfig(interval=10, keep_last=9),
        recovery=RecoveryConfig(**cell.get("recovery", {})),
    )


def train_cell(corpus: Path, output: Path, cell: dict[str, Any], world: World) -> dict[str, Any]:
    """Train a cell from its start or `cell["resume"]` to `cell["until"]`, saving at `"save_at"`.

    If it resumes from a step of `save_at`, it first saves what it has just loaded.
    """
    run = run_of_cell(corpus, cell)
    scale_and_window = cell["engine"].get("loss_scale", (65536.0, 1000))
    engines.INITIAL_SCALE, engines.WINDOW = scale_and_window
    engine = build_engine(run, world)
    for fault in cell.get("faults", []):
        engine = with_fault(engine, Fault(**fault))
    num_slots = accumulation_steps(run, world.world_size)
    state, opened = None, []
    if "resume" in cell:
        root = output / cell["resume"]
        before = cell["resume_at"] + 1 if "resume_at" in cell else None
        found = find_resume_point(root, world, "", before)
        assert found is not None, f"no checkpoint in {cell['resume']}"
        state = Checkpointer(run, Disk(root, "resume", ""), world).restore(engine, found)
        opened = gather_values(load_fragments(engine, found), list[int])
    state = state or TrainState.fresh(num_slots)
    lanes = lanes_of_rank(run, world.rank, world.world_size)
    data, length = Corpus.open(corpus / "train"), run.lane_tokens_per_step
    stream = LaneStream(data, run.data.lanes, run.seed, length, lanes, state.cursor)
    checkpointer = Checkpointer(run, Disk(output / cell["name"], cell["name"], ""), world)
    losses, norms, scales, layers = {}, {}, {}, {}
    findings: dict[str, Any] = {"opened": opened}
    validation: dict[int, str] = {}

    def measure_validation() -> None:
        if state.step in cell.get("evaluate_at", []):
            validation[state.step] = evaluate(run, engine)["loss"].hex()

    if state.step in cell["save_at"]:
        checkpointer.save(engine, state)
    measure_validation()
    while state.step < cell["until"]:
        batch = next(stream)
        to_be_skipped = state.step + 1 in cell.get("skips", [])
        may_be_skipped = to_be_skipped or engine.loss_scaler is not None
        memories, before = list(state.memories), bits_of(engine) if may_be_skipped else {}
        total = torch.zeros((), dtype=torch.float64)
        for slot, part in enumerate(batch.split(num_slots)):
            memory = state.memories[slot]
            loss, state.memories[slot] = engine.forward_backward(part, memory, state.step)
            total += loss.double() / num_slots
        checkpointer.wait_for_copy()
        measuring = state.step + 1 in cell.get("measure_at", [])
        weights = weights_of(engine) if measuring else {}
        result = engine.step(learning_rate_at(run.optim, state.step), measuring)
        state.step += 1
        state.cursor = batch.cursor
        losses[state.step] = (sum_over_ranks(total).item() / world.world_size).hex()
        norms[state.step] = float(result.grad_norm if result.grad_norm is not None else -1.0).hex()
        if result.loss_scale is not None:
            scales[state.step] = result.loss_scale.hex()
        assert result.skipped == (to_be_skipped or result.overflowed)
        if measuring:
            for key, value in per_layer(engine, run, weights, result).items():
                layers.setdefault(key, {})[state.step] = value.hex()
        if result.skipped:
            if not result.overflowed:
                state.memories = memories_without(MemoryLayout(run.model), batch, memories)
            assert bits_of(engine) == before, "a skipped step changed a weight, a moment or a count"
        if state.step in cell["save_at"]:
            checkpointer.save(engine, state)
        measure_validation()
    checkpointer.finish()
    if "drift" in cell:
        findings["refused"] = refusal_of_drift(engine, state, checkpointer, cell["drift"])
    if "pickle_of_rank" in cell:
        findings["pickle"] = refusal_of_a_pickle(output, cell["pickle_of_rank"], world)
    if "damage" in cell:
        findings["resume_points"] = resume_points(output / cell["name"], cell["damage"], world)
    steps = {"losses": losses, "norms": norms, "scales": scales, "validation": validation, **layers}
    return {**steps, "findings": findings}


def evaluate(run: RunConfig, engine: Engine) -> dict[str, float]:
    """Return what an evaluation in three lanes finds: not one for every rank of four."""
    settings = EvaluationConfig(lanes=3, max_tokens=150)
    measure = training_evaluator(dataclasses.replace(run, evaluation=settings), engine)
    return measure(settings.max_tokens)


def resume_points(root: Path, name: str, world: World) -> dict[str, Any]:
    """Which step each rank would resume from while a bit of the file is flipped, and after."""
    found = {}
    for when in ("damaged", "repaired"):
        if world.is_main:
            content = bytearray((root / name).read_bytes())
            content[len(content) // 2] ^= 1
            (root / name).write_bytes(content)
        point = find_resume_point(root, world, run_id="")
        assert point is not None
        found[when] = gather_values(point.step, int)
        found[f"{when}, progress"] = latest_step(root)
    return found


def refusal_of_drift(
    engine: Engine, state: TrainState, checkpointer: Checkpointer, drift: list[Any]
) -> dict[str, str]:
    """Change the lowest bit of a replicated value on one rank and save again; returns the error."""
    rank, name = drift
    value = dict(replicated_values(engine))[name].detach()
    if engine.world.rank == rank:
        value.view(-1)[-1:].view(torch.uint8)[0] ^= 1
    try:
        checkpointer.save(engine, state)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"error": ""}


class Runs:
    """An object whose unpickling runs code: it notes in the directory which rank did so."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        note = f"import os; open('{self.directory}/executed-' + os.environ['RANK'], 'w').close()"
        return exec, (note,)


def refusal_of_a_pickle(directory: Path, sender: int, world: World) -> dict[str, str]:
    """Let a rank send a pickle where the others send values; returns the error there."""
    if world.rank == sender:
        message = torch.frombuffer(bytearray(pickle.dumps(Runs(directory))), dtype=torch.uint8)
        most = int(gather_rows(torch.tensor([message.numel()])).max())
        gather_rows(pad(message, (0, most - message.numel())))
        return {}
    try:
        gather_values("", str)
    except UserError as error:
        return {"error": str(error)}
    return {"error": ""}


def weights_of(engine: Engine) -> dict[tuple[str, int], torch.Tensor]:
    """A copy of the master weights that this rank owns."""
    owned = [each for each in engine.fragments() if each.owned]
    return {(each.name, each.start): each.values["weight"].clone() for each in owned}


def per_layer(
    engine: Engine, run: RunConfig, before: dict[tuple[str, int], torch.Tensor], result: StepResult
) -> dict[str, float]:
    """Return the measured norms and `seen_ratio/LAYER`, the same ratio from the weights."""
    assert result.layers is not None
    assert result.grad_norm is not None
    names = result.layers.names
    seen = torch.zeros(2, len(names), dtype=torch.float64)
    for key, after in weights_of(engine).items():
        for row, values in enumerate((after - before[key], after)):
            seen[row, names.index(layer_name(key[0]))] += values.double().square().sum()
    moved, lengths = sum_over_ranks(seen).sqrt()
    squares = sum_over_ranks(result.layers.squares_KG).flatten().tolist()
    measured = layer_metrics(names, squares, float(result.grad_norm), run.optim.clip_norm)
    ratios = {f"seen_ratio/{name}": float(moved[g] / lengths[g]) for g, name in enumerate(names)}
    return {**measured, **ratios}


def bits_of(engine: Engine) -> dict[str, str]:
    """Return all bits of this rank's masters and moments, and of the model's weights."""
    values = {
        f"{fragment.name} {fragment.start} {kind}": value
        for fragment in engine.fragments()
        for kind, value in fragment.values.items()
    }
    values |= {name: parameter.detach() for name, parameter in engine.module.named_parameters()}
    raw = {name: value.contiguous().view(torch.uint8).numpy() for name, value in values.items()}
    bits = {name: sha256(raw[name]).hexdigest() for name in raw}
    return {**bits, "count": str(engine.optimizer_step_count())}


def train_rank(corpus: Path, output: Path, cells: list[dict[str, Any]]) -> int:
    """One rank's way through the cells."""
    torch.set_num_threads(1)
    world = init_world()
    for cell in cells:
        result = train_cell(corpus, output, cell, world)
        if world.is_main:
            (output / f"{cell['name']}.json").write_text(json.dumps(result))
    destroy_process_group()
    return 0
