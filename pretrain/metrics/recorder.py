"""Recording a run's metrics while it trains: metrics.jsonl, TensorBoard, and a line in the log.

Losses stay on the device until the end of an interval. Then the ranks exchange one small vector,
and rank 0 writes:

    {"kind": "train", "step", "tokens", "loss", "perplexity", "learning_rate", "grad_norm",
     "skipped"}    every step; loss and norm are null where a skipped step had none. In fp16 also
                   "overflowed".
                   The last line of an interval adds "seconds", "time" (since 1970), "totals" (sums
                   over the run so far, `metrics_file.TimeSpent`),
                   "train_loss" (`metric_names`), "tokens_per_second", "mfu", "data_wait",
                   "used_memory_gib" (mean over ranks), "save_stall" (seconds the loop waited for
                   saves), "stall" (seconds lost in steps
                   that took far longer than usual; not in "seconds"); with several ranks
                   "slowest_rank" and "straggler_ratio"; "memory_norm/layer.N" (mean L2 norm of
                   the rows in a layer's memory, over all lanes); in fp16
                   "loss_scale"; at full intervals norms per layer (`parameter_groups`)
    {"kind": "evaluation", "step", "seconds", "loss", "perplexity", ...}; of each set also
                   "loss/NAME" and "bits_per_byte/NAME", of tasks "tasks/TASK/METRIC"

A step's loss is the mean over its slots and ranks, summed in float64. That is exact wherever
intervals begin, so a resumed run writes the same numbers for the same steps.

MFU refers to the peak of the GPUs' data sheet, as in `describe`. Without one, as on a CPU, it
refers to a large matrix product, measured at the start.

All ranks end a step together, so its duration says nothing of a **straggler**. What differs is how
long a rank waits for its data and computes its forward passes, before the first collective. Under
ZeRO-3 ranks already wait for each other in the forward pass, so only slow reading shows there.

A **stall** is a step that takes far longer than usual: a stopped process, a frozen host or storage
that hangs costs every rank the same time, because all of them wait. That time is not productive.
Each rank notices by a thread that ticks whether its own process stood still.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.lanes.lane_stream import Prefetcher
from foundation.files import sync_file
from foundation.retry import outlast
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import DEVICES, device_named
from pretrain.costs.flops import flops_per_token
from pretrain.costs.throughput import measured_matmul_peak, memory_in_use_gib
from pretrain.distributed.world import (
    World,
    broadcast_value,
    raise_on_all_ranks,
    sum_over_ranks,
)
from pretrain.engines.engine import StepResult
from pretrain.metrics.wandb_writer import Copy
from pretrain.metrics.writers import MetricsFile, StepProfiler, TensorBoard
from pretrain.model.lane_state import LaneState
from pretrain.model.parameters import dtype_of
from pretrain.optim.parameter_groups import layer_metrics
from pretrain.rundir.events import Slowdown
from pretrain.rundir.metric_names import set_losses, task_columns, train_loss
from pretrain.rundir.metrics_file import has_evaluation
from pretrain.rundir.run_dir import RunDir
from pretrain.state import TrainState
from pretrain.terminal.text import counted, evaluation_line, perplexity, si, train_line

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
LEAST_STANDSTILL_SECONDS = 2.0  # a tick that is later by less may be a busy machine's
LEAST_STALL_SECONDS = 5.0
TIMES_USUAL = 5.0
STEPS_KNOWN, LEAST_STEPS_KNOWN = 100, 3  # by which a step is judged
SLOW = 1.5  # times the median of the other ranks
INTERVALS_IN_A_ROW = 3  # a rank must be slow for at least this many: one may be a hiccup
LEAST_SECONDS = 1.0  # that it must have cost in them: short intervals vary by more than slow ranks


class SlownessMeter:
    """Times this rank's forward passes in training mode and its standstills; finds stalls by the
    durations of the steps before. On a GPU passes are timed with the device's clock."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._world = world
        self._stalled = 0.0
        self._known: deque[float] = deque(maxlen=STEPS_KNOWN)
        self._started: Any = None
        self._passes: list[tuple[Any, Any]] = []
        self._handles = (
            module.register_forward_pre_hook(self._start),
            module.register_forward_hook(self._stop),
        )
        self._stood_still = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="standstill", daemon=True)
        self._thread.start()

    def end_step(self, seconds: float, is_whole: bool = True) -> None:
        """Take the duration of a step, or of a part that does not count as usual."""
        if len(self._known) >= LEAST_STEPS_KNOWN:
            usual = statistics.median(self._known)
            if seconds - usual > LEAST_STALL_SECONDS and seconds > TIMES_USUAL * usual:
                self._stalled += seconds - usual
        if is_whole:
            self._known.append(seconds)

    def take_stalled(self) -> float:
        """The seconds lost in stalls since the last call."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def take(self, waited: float) -> list[float]:
        """By rank the seconds that it was busy since the last call, and those it stood still.

        `waited`: for data. 0 for all other ranks, so that sums are all's. Waits for the device.
        """
        passes, self._passes = self._passes, []
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
            computed = sum(start.elapsed_time(end) for start, end in passes) / 1000.0
        else:
            computed = sum(end - start for start, end in passes)
        stood_still, self._stood_still = self._stood_still, 0.0
        of_R = [0.0] * (2 * self._world.world_size)
        of_R[self._world.rank] = waited + computed
        of_R[self._world.world_size + self._world.rank] = stood_still
        return of_R

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._closing.set()
        self._thread.join()

    def _start(self, module: nn.Module, _inputs: Any) -> None:
        self._started = self._now() if module.training else None

    def _stop(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._started is not None:
            self._passes.append((self._started, self._now()))

    def _now(self) -> Any:
        if self._world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(TICK_SECONDS):
            now = time.monotonic()
            if now - before > LEAST_STANDSTILL_SECONDS:
                self._stood_still += now - before - TICK_SECONDS
            before = now


def rank_that_stalled(
    stalled: float, standstill_R: Sequence[float], busy_R: Sequence[float]
) -> int | None:
    """The rank that stood still, or was busy alone, for at least half of the stall.

    None if there is only one rank, or if it was not one rank's doing.
    """
    for seconds_R in (standstill_R, busy_R):
        longest = max(seconds_R)
        rank = seconds_R.index(longest)
        others = [seconds for other, seconds in enumerate(seconds_R) if other != rank]
        if others and longest - max(others) >= stalled / 2:
            return rank
    return None


def slowest_rank(step: int, seconds_R: Sequence[float]) -> Slowdown | None:
    """The rank that took longest for its own work, compared with the median of the others; None if
    there is only one."""
    if len(seconds_R) < 2:
        return None
    rank = max(range(len(seconds_R)), key=seconds_R.__getitem__)
    others = statistics.median(seconds for other, seconds in enumerate(seconds_R) if other != rank)
    ratio = seconds_R[rank] / max(others, 1e-9)
    return Slowdown(step=step, rank=rank, seconds=seconds_R[rank], ratio=ratio)


class StragglerWatch:
    """Names a rank once: when it took SLOW times as long as others for some intervals in a row.

    At least 3 intervals, and enough of them that it has cost a second.
    """

    def __init__(self) -> None:
        self._rank: int | None = None
        self._count, self._cost, self._is_named = 0, 0.0, False

    def observe(self, slowest: Slowdown, num_steps: int) -> bool:
        """Whether the rank is to be named at this interval of so many steps."""
        ratio = slowest.ratio or 1.0
        is_slow = ratio >= SLOW
        if not is_slow or slowest.rank != self._rank:
            self._count, self._cost, self._is_named = 0, 0.0, False
        self._rank = slowest.rank if is_slow else None
        self._count += is_slow
        self._cost += (slowest.seconds - slowest.seconds / ratio) * num_steps if is_slow else 0.0
        if self._is_named or self._count < INTERVALS_IN_A_ROW or self._cost < LEAST_SECONDS:
            return False
        self._is_named = True
        return True


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

    Metrics after `state.step` are removed first: those steps are repeated. `may_write` is called
    before each write; it raises UserError in an attempt that another one has replaced. `copy` takes
    each line as well.
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
        self._state, self._lane_state = state, LaneState(run.model)
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
        peaks = sum_over_ranks(torch.tensor([own], dtype=torch.float64, device=world.device))
        self._peak = float(peaks)
        self._slowness = SlownessMeter(module, world)
        if world.is_main:
            self._file = MetricsFile(run_dir, state.step, may_write)
            if run.metrics.tensorboard:
                self._tensorboard = TensorBoard(run_dir.tensorboard, state.step)
            self._profiler = StepProfiler(*run.metrics.profile_steps, run_dir.traces)
            self._profiler.after_step(state.step)
            logger.info(
                "MFU = tokens/s x %sFLOP per token / %sFLOP/s of %s in %s (%s)",
                si(self._flops_per_token), si(self._peak), counted(world.world_size, "rank"),
                precision, f"{name}'s data sheet" if name else "a large matrix product, measured",
            )  # fmt: skip
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
        losses, (waited, used_memory_gib, *of_R), norms, squares = self._over_ranks(steps)
        self._end_of_step(is_whole=False)  # a rank may have been waited for in the exchange
        stalled = self._slowness.take_stalled()
        seconds = time.perf_counter() - self._start - self._paused - stalled
        if self._file is not None:
            ranks = self._world.world_size
            busy_R, standstill_R = of_R[:ranks], of_R[ranks:]
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
                "save_stall": self._save_stall,
                "time": time.time(),
            }
            lines[-1] |= self._slowest(last.step, busy_R, len(steps))
            if stalled:
                rank = rank_that_stalled(stalled, standstill_R, busy_R)
                event = Slowdown(step=last.step, seconds=stalled, rank=rank)
                self._run_dir.ledger.append_if_possible(event)
                logger.warning("%s; this time is not productive", event.description)
                lines[-1]["stall"] = stalled
            if last.result.loss_scale is not None:
                lines[-1]["loss_scale"] = last.result.loss_scale
            memory = next(iter(self._state.memories), None)
            rows = [each.shape[1] for each in self._lane_state.vectors(memory)] if memory else []
            lines[-1] |= {
                f"memory_norm/layer.{layer}": _finite(norm / (count * self._run.data.lanes))
                for layer, (norm, count) in enumerate(zip(norms, rows, strict=True))
                if count
            }
            if last.result.layers is not None and last.result.grad_norm is not None:
                names, norm = last.result.layers.names, float(last.result.grad_norm)
                lines[-1] |= layer_metrics(names, squares, norm, self._run.optim.clip_norm)
            self._append(self._file, lines)
            total = self._run.optim.steps
            logger.info(train_line(lines, total, seconds / len(steps)))
        self._start_interval()
        return lines

    def write_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Write what an evaluation after `step` found; its time does not count as training."""
        start = self._idle_since
        self._pause_since(start)
        if self._file is not None:
            seconds = self._idle_since - start
            line = {"kind": "evaluation", "step": step, "seconds": seconds, **values}
            self._append(self._file, [line])
            logger.info(evaluation_line(step, values, set_losses(values) | task_columns(values)))

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation after `step` is on disk. A collective."""
        found = self._file is not None and has_evaluation(self._run_dir.metrics, step)
        return broadcast_value(found, bool)

    def unwritten(self) -> str:
        """Why metrics until now are not written, after trying once more; '' if they are.

        They are on disk once a save that asked this is published: its thread syncs them.
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
        """Write and sync what is left; StorageError, on every rank, if patience ends before.

        A collective. How training ended is told only after this.
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
                outlast(self._run_dir.patience, sync)
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _append(self, file: MetricsFile, lines: list[dict[str, Any]]) -> None:
        file.append(lines)
        if self._tensorboard is not None:
            self._tensorboard.append(lines)
        self._copy(lines)

    def _over_ranks(self, steps: Sequence[_Step]) -> tuple[list[float], ...]:
        """Sums over ranks: losses by step, ranks' measurements, norms of memories over all lanes,
        squared norms of layers."""
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
        """By layer the sum of the norms of the rows in this rank's memories."""
        of_slots = []
        for memory in filter(None, self._state.memories):
            vectors = self._lane_state.vectors(memory)
            rows = (rows_BMX.to(device, non_blocking=True) for rows_BMX in vectors)
            norms = (torch.linalg.vector_norm(each, dim=-1, dtype=torch.float32) for each in rows)
            of_slots.append(torch.stack([norms_BM.sum(dtype=torch.float64) for norms_BM in norms]))
        return torch.stack(of_slots).sum(0) if of_slots else torch.empty(0, device=device)

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
    """None for NaN and inf, which JSON does not have."""
    return value if math.isfinite(value) else None
