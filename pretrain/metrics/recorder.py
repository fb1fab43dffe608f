"""Recording a run's metrics while it trains: metrics.jsonl, TensorBoard, and a line in the log.

Losses stay on the device until the end of an interval. Then the ranks exchange one small vector,
and rank 0 writes:

    {"kind": "train", "step", "tokens", "loss", "perplexity", "learning_rate", "grad_norm",
     "skipped"}    every step; loss and norm are null where a skipped step had none. In fp16 also
                   "overflowed". The last line of an interval adds "seconds", "time" (since 1970),
                   "totals" (`metrics_file.TimeSpent`), "train_loss" (`metric_names`),
                   "tokens_per_second", "mfu", "data_wait" (fraction of "seconds", mean over ranks),
                   "used_memory_gib" (mean over ranks), "save_stall" (seconds the loop waited for
                   saves), "stall" (seconds lost in stalls (`stragglers`); not in "seconds"); with
                   several ranks "slowest_rank" and "straggler_ratio"; "memory_norm/layer.N" (mean
                   L2 norm of the rows in a layer's memory, over all lanes); in fp16 "loss_scale";
                   at full intervals norms per layer (`parameter_groups`)
    {"kind": "evaluation", "step", "seconds", "loss", "perplexity", ...}; "stall" as above; for each
                   set also "loss/NAME" and "bits_per_byte/NAME", for tasks "tasks/TASK/METRIC"

A step's loss is the mean over its slots and ranks. The sum in float64 does not depend on where an
interval begins, so a resumed run writes the same numbers for the same steps. MFU is relative to the
peak in the GPU's data sheet, as in `describe`. For devices without one, such as CPUs, it is
relative to the speed of a large matrix product, measured at the start.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.lanes.prefetcher import Prefetcher
from foundation.files import sync_file
from pretrain.checkpoint.storage_retry import with_retries
from pretrain.config.devices import DEVICES, device_named
from pretrain.config.run import RunConfig
from pretrain.costs.flops import flops_per_token
from pretrain.costs.throughput import measured_matmul_peak, memory_in_use_gib
from pretrain.distributed.collectives import raise_on_all_ranks, read_on_main, sum_over_ranks
from pretrain.distributed.world import World
from pretrain.engines.engine import StepResult
from pretrain.metrics.stragglers import (
    LEAST_STALL_SECONDS,
    SlownessMeter,
    StragglerWatch,
    rank_that_stalled,
    slowest_rank,
)
from pretrain.metrics.wandb_writer import Copy
from pretrain.metrics.writers import MetricsFile, StepProfiler, TensorBoard
from pretrain.model.memory import MemoryLayout
from pretrain.model.parameters import dtype_of
from pretrain.optim.parameter_groups import layer_metrics
from pretrain.rundir.events import Slowdown
from pretrain.rundir.metric_names import set_losses, task_columns, train_loss
from pretrain.rundir.metrics_file import has_evaluation
from pretrain.rundir.run_dir import RunDir
from pretrain.state import TrainState
from pretrain.terminal.text import counted, evaluation_line, perplexity, si, train_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Step:
    """A finished step whose numbers may still be on the device."""

    step: int
    tokens: int
    loss_sum: Tensor  # over this rank's slots
    num_slots: int
    learning_rate: float
    result: StepResult


class MetricsRecorder:
    """Measures on every rank, writes on rank 0.

    It first removes metrics after `state.step`, because those steps are repeated. It calls
    `may_write` before each write, which raises UserError in an attempt that was replaced. `copy`
    gets every line as well.
    """

    def __init__(
        self,
        run: RunConfig,
        run_dir: RunDir,
        world: World,
        state: TrainState,
        prefetcher: Prefetcher,
        module: nn.Module,
        may_write: Callable[[], None] = lambda: None,
        copy: Copy = lambda lines: None,
    ) -> None:
        self._run = run
        self._run_dir = run_dir
        self._world = world
        self._prefetcher = prefetcher
        self._copy = copy
        self._state, self._memory_layout = state, MemoryLayout(run.model)
        self._stragglers = StragglerWatch()
        self._file: MetricsFile | None = None
        self._tensorboard: TensorBoard | None = None
        self._profiler: StepProfiler | None = None
        self._slot_losses: list[Tensor] = []
        self._steps: list[_Step] = []
        self._flops_per_token = flops_per_token(run)
        name, precision = "", run.engine.number_format
        if world.device.type == "cuda":
            name = device_named(torch.cuda.get_device_name(world.device))
        own = DEVICES[name].peak(run.engine) if name else 0.0
        own = own or measured_matmul_peak(world.device, dtype_of(precision))
        peak = sum_over_ranks(torch.tensor([own], dtype=torch.float64, device=world.device))
        self._peak = float(peak)  # FLOP/s of all ranks
        self._slowness = SlownessMeter(module, world)
        with raise_on_all_ranks():
            if world.is_main:
                self._file = MetricsFile(run_dir, state.step, may_write)
        if world.is_main:
            if run.metrics.tensorboard:
                self._tensorboard = TensorBoard(run_dir.tensorboard, state.step)
            self._profiler = StepProfiler(*run.metrics.profile_steps, run_dir.traces)
            self._profiler.after_step(state.step)
            logger.info(
                "MFU = tokens/s x %sFLOP per token / %sFLOP/s of %s in %s (%s)",
                si(self._flops_per_token), si(self._peak), counted(world.world_size, "rank"),
                precision, f"{name}'s data sheet" if name else "a large matrix product, measured",
            )  # fmt: skip
        self._exchanging = 0.0  # seconds from the last interval's end to the next one's start
        self._start_interval()

    def add_loss(self, loss: Tensor) -> None:
        """Take the mean loss of one slot, without waiting for the device."""
        self._slot_losses.append(loss.detach())

    def end_step(self, state: TrainState, result: StepResult, learning_rate: float) -> None:
        """Finish the current step, still without waiting for the device."""
        losses, self._slot_losses = self._slot_losses, []
        total = torch.stack([loss.double() for loss in losses]).sum()
        self._steps.append(
            _Step(state.step, state.tokens_seen, total, len(losses), learning_rate, result)
        )
        self._idle_since = time.perf_counter()
        self._end_of_step()
        if self._profiler is not None:
            self._profiler.after_step(state.step)

    def write(self) -> list[dict[str, Any]]:
        """Write the steps since the last call; return their lines on rank 0. A collective."""
        lines: list[dict[str, Any]] = []
        if not self._steps:
            return lines
        steps, self._steps = self._steps, []
        losses, (waited, used_memory_gib, *busy_R), norms, squares = self._over_ranks(steps)
        self._end_of_step(is_whole=False)  # the exchange may have waited for a rank
        stalled = self._slowness.take_stalled()
        end = time.perf_counter()
        seconds, save_stall = end - self._start - self._paused - stalled, self._save_stall
        frozen_R = self._slowness.take_frozen()
        if (longest := max(frozen_R)) > max(stalled, LEAST_STALL_SECONDS):
            # A rank froze where no step was slow: in the exchange of the interval before, in a
            # save, or in steps that usually take as long.
            elsewhere = max(0.0, longest - stalled - self._exchanging)
            in_saves = min(elsewhere, save_stall)
            seconds = max(1e-3, seconds - elsewhere + in_saves)
            save_stall -= in_saves
            stalled = longest
        with raise_on_all_ranks():
            if self._file is not None:
                ranks = self._world.world_size
                lines = [
                    _line(step, loss / ranks / step.num_slots)
                    for step, loss in zip(steps, losses, strict=True)
                ]
                last = steps[-1]
                lines[-1]["train_loss"] = train_loss(lines)
                tokens_per_second = len(steps) * self._run.tokens_per_step / seconds
                lines[-1] |= {
                    "seconds": seconds,
                    "tokens_per_second": tokens_per_second,
                    "mfu": tokens_per_second * self._flops_per_token / self._peak,
                    "data_wait": waited / ranks / seconds,
                    "used_memory_gib": used_memory_gib / ranks,
                    "save_stall": save_stall,
                    "time": time.time(),
                }
                lines[-1] |= self._slowest(last.step, busy_R, len(steps))
                if stalled:
                    rank = rank_that_stalled(stalled, frozen_R, busy_R)
                    lines[-1]["stall"] = self._report_stall(last.step, stalled, rank)
                if last.result.loss_scale is not None:
                    lines[-1]["loss_scale"] = last.result.loss_scale
                lines[-1] |= self._mean_norms(norms)
                if last.result.layers is not None and last.result.grad_norm is not None:
                    names, norm = last.result.layers.names, float(last.result.grad_norm)
                    lines[-1] |= layer_metrics(names, squares, norm, self._run.optim.clip_norm)
                self._append(self._file, lines)
                total = self._run.optim.steps
                logger.info(train_line(lines, total, seconds / len(steps)))
        self._exchanging = time.perf_counter() - end
        self._start_interval()
        return lines

    def write_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Write an evaluation's results; its time does not count as training. A collective."""
        start = self._idle_since
        frozen_R = self._slowness.take_frozen()
        self._pause_since(start)
        with raise_on_all_ranks():
            if self._file is None:
                return
            seconds = self._idle_since - start
            line = {"kind": "evaluation", "step": step, "seconds": seconds, **values}
            if (longest := min(seconds, max(frozen_R))) >= LEAST_STALL_SECONDS:
                rank = rank_that_stalled(longest, frozen_R, frozen_R)
                line["stall"] = self._report_stall(step, longest, rank)
                line["seconds"] -= longest
            self._append(self._file, [line])
            logger.info(evaluation_line(step, values, set_losses(values) | task_columns(values)))

    def has_evaluation(self, step: int) -> bool:
        """Return whether an evaluation after `step` is on disk. A collective."""
        return read_on_main(self._world, lambda: has_evaluation(self._run_dir.metrics, step), bool)

    def unwritten(self) -> str:
        """Try to write what is left; return why metrics until now are not written, or ''.

        A save's thread calls this before it publishes, and then syncs the file.
        """
        return self._file.write() if self._file is not None else ""

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Count the block as time that saving took, not as training time."""
        start = time.perf_counter()
        yield
        self._pause_since(start)
        self._save_stall += self._idle_since - start

    def close(self) -> None:
        """Write and sync what is left, before the run's end is recorded. A collective.

        StorageError on every rank if that fails.
        """
        self.write()
        self._slowness.close()
        if self._profiler is not None:
            self._profiler.close()

        def sync() -> None:
            if problem := self.unwritten():
                raise OSError(problem)
            sync_file(self._run_dir.metrics)

        with raise_on_all_ranks():
            if self._file is not None:
                with_retries(self._run_dir.retry, sync)
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _report_stall(self, step: int, seconds: float, rank: int | None) -> float:
        """Record a stall in ledger and log; returns its seconds."""
        event = Slowdown(step=step, seconds=seconds, rank=rank)
        self._run_dir.ledger.append_if_possible(event)
        logger.warning("%s; this time is not productive", event.description)
        return seconds

    def _append(self, file: MetricsFile, lines: list[dict[str, Any]]) -> None:
        file.append(lines)
        if self._tensorboard is not None:
            self._tensorboard.append(lines)
        self._copy(lines)

    def _over_ranks(self, steps: Sequence[_Step]) -> tuple[list[float], ...]:
        """Return sums over ranks: of losses, of measurements, of memories' and of layers' norms."""
        losses = torch.stack([step.loss_sum for step in steps])
        waited = self._prefetcher.wait_seconds - self._waited_before
        numbers = [waited, memory_in_use_gib(self._world.device), *self._slowness.take(waited)]
        own = torch.tensor(numbers, dtype=torch.float64, device=losses.device)
        layers = steps[-1].result.layers
        squares = layers.squares_KG.flatten().to(losses.device) if layers else losses.new_empty(0)
        parts = [losses, own, self._memory_norms(losses.device), squares]
        sums = sum_over_ranks(torch.cat(parts)).cpu()
        return tuple(part.tolist() for part in sums.split([len(part) for part in parts]))

    def _memory_norms(self, device: torch.device) -> Tensor:
        """Return for each layer the sum of the norms of the rows in this rank's memories."""
        of_slots = []
        for memory in filter(None, self._state.memories):
            vectors = self._memory_layout.vectors(memory)
            rows = (rows_BMX.to(device, non_blocking=True) for rows_BMX in vectors)
            norms = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in rows)
            of_slots.append(torch.stack([norms_BM.sum(dtype=torch.float64) for norms_BM in norms]))
        return torch.stack(of_slots).sum(0) if of_slots else torch.empty(0, device=device)

    def _mean_norms(self, norms: list[float]) -> dict[str, Any]:
        memory = next(iter(self._state.memories), None)
        vectors = self._memory_layout.vectors(memory) if memory else ()
        rows = [rows_BMX.shape[1] for rows_BMX in vectors]
        return {
            f"memory_norm/layer.{layer}": _finite(norm / (count * self._run.data.lanes))
            for layer, (norm, count) in enumerate(zip(norms, rows, strict=True))
            if count
        }

    def _end_of_step(self, is_whole: bool = True) -> None:
        now, paused = time.perf_counter(), self._paused
        self._slowness.end_step(now - self._step_start - (paused - self._paused_before), is_whole)
        self._step_start, self._paused_before = now, paused

    def _slowest(self, step: int, busy_R: list[float], num_steps: int) -> dict[str, Any]:
        slowest = slowest_rank(step, [busy / num_steps for busy in busy_R])
        if slowest is None:
            return {}
        if self._stragglers.observe(slowest, num_steps):
            self._run_dir.ledger.append_if_possible(slowest)
            logger.warning(
                "straggler: rank %d needs %.3g s per step for its own work, %.1f times the median "
                "of the others; %s names its node",
                slowest.rank, slowest.seconds, slowest.ratio, self._run_dir.heartbeats,
            )  # fmt: skip
        return {"slowest_rank": slowest.rank, "straggler_ratio": slowest.ratio}

    def _start_interval(self) -> None:
        self._paused = self._save_stall = 0.0
        self._waited_before = self._prefetcher.wait_seconds
        self._start = self._idle_since = self._step_start = time.perf_counter()
        self._paused_before = 0.0

    def _pause_since(self, start: float) -> None:
        self._idle_since = time.perf_counter()
        self._paused += self._idle_since - start


def _line(step: _Step, loss: float) -> dict[str, Any]:
    norm = step.result.grad_norm
    return {
        "kind": "train",
        "step": step.step,
        "tokens": step.tokens,
        "loss": _finite(loss),
        "perplexity": _finite(perplexity(loss)),
        "learning_rate": step.learning_rate,
        "grad_norm": None if norm is None else _finite(float(norm)),
        "skipped": step.result.skipped,
        **({} if step.result.loss_scale is None else {"overflowed": step.result.overflowed}),
    }


def _finite(value: float) -> float | None:
    """Return None for NaN and inf, which JSON does not have."""
    return value if math.isfinite(value) else None
