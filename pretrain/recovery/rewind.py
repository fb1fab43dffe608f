"""How the ranks heal a run together: rank 0 decides from the losses, all go back, the suspect documents are named."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.errors import TrainingError
from data_pipeline.lanes.audit import ReadSpan, audit_steps
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import Mixture
from pretrain.checkpoint import directory as files
from pretrain.config.phases import first_step_at, lane_seed_at, lanes_since, run_at
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World, any_rank, broadcast_object, raise_on_all_ranks
from pretrain.engines.engine import Engine, Memory
from pretrain.recovery.loss_spikes import (
    Spike,
    SpikeDetector,
    lane_lengths,
    segments_consumed,
    skipped_windows,
    window_of,
)
from pretrain.rundir.ledger import events_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import (
    Event,
    GaveUp,
    Rewind,
    SuspectDocument,
    SuspectDocuments,
)
from pretrain.state import TrainState

logger = logging.getLogger(__name__)

NUM_SUSPECTS = 5
WITHOUT_END = 1 << 62


class SpikeFound(Exception):
    """Raised on every rank at the same step."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(spike.describe())
        self.spike = spike


class SpikeMonitor:
    """Watches the losses. What it knows comes from metrics.jsonl, so a resumed run decides as an undisturbed one."""

    def __init__(self, run: RunConfig, run_dir: RunDir, world: World, state: TrainState) -> None:
        self._detector = SpikeDetector(run.recovery)
        if world.is_main:
            measured = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
            self._observe(line for line in measured if line["step"] <= state.step)

    def check(self, lines: Iterable[dict[str, Any]]) -> None:
        """Hear of new steps (rank 0 has their lines); SpikeFound on all ranks if they are out of line."""
        spike = self._observe(lines)
        if any_rank(spike is not None):
            raise SpikeFound(broadcast_object(spike))  # type: ignore[arg-type]  (rank 0 has it)

    def _observe(self, lines: Iterable[dict[str, Any]]) -> Spike | None:
        found = None
        for line in lines:
            if line.get("overflowed"):
                continue  # the loss scale was too large, which says nothing about data or weights
            found = (
                self._detector.observe(line["step"], None if line["skipped"] else line["loss"])
                or found
            )
        return found


def rewind(run: RunConfig, run_dir: RunDir, world: World, spike: Spike) -> None:
    """Let the next start go on from the checkpoint before the spike and pass over its data; TrainingError if that was
    done too often already."""
    with raise_on_all_ranks():
        if not world.is_main:
            return
        ledger = run_dir.ledger.read()
        windows = skipped_windows(ledger)
        num_rewinds = len(events_of(ledger, Rewind))  # windows that touch are one
        if num_rewinds >= run.recovery.max_rewinds:
            run_dir.ledger.append(
                GaveUp(
                    first_step=spike.first_step,
                    step=spike.last_step,
                    loss=spike.loss,
                    usual_loss=spike.usual,
                )
            )
            raise TrainingError(_report(run, spike, ledger))
        # Before the ledger knows: with the window but on the spike's branch a crash would leave a run of neither kind.
        files.discard_from(run_dir.checkpoints, spike.first_step)
        step = max(files.steps_on_disk(run_dir.checkpoints), default=0)
        window = window_of(spike, windows, run, step)
        run_dir.ledger.append(
            Rewind(
                first_step=spike.first_step,
                step=spike.last_step,
                to_step=step,
                segments=(window.start, window.stop),
                loss=spike.loss,
                usual_loss=spike.usual,
            )
        )
        logger.warning(
            "recovery: %s; rewinding to step %d, skipping segments %d to %d (rewind %d of at most %d)",
            spike.describe(),
            step,
            window.start,
            window.stop - 1,
            num_rewinds + 1,
            run.recovery.max_rewinds,
        )


def name_suspects(
    run: RunConfig,
    run_dir: RunDir,
    engine: Engine,
    corpus: Corpus | Mixture,
    state: TrainState,
    lanes: range,
) -> None:
    """After a rewind: write down which documents of the last window the good weights find hardest to predict.

    `run` has all its phases, `corpus` and `lanes` are those of the state's.
    """
    earlier, window = broadcast_object(_open_case(run_dir))
    if window is None:
        return
    phase = _segments_of_phase(run, state.step, earlier)
    window = range(max(window.start, phase.start), min(window.stop, phase.stop))
    if not window:
        return  # it lies in a later phase
    data, seed = run_at(run, state.step).data, lane_seed_at(run, state.step)
    stream = LaneStream(corpus, data.lanes, seed, data.segment_length, lanes, state.cursor)
    for _ in range(segments_consumed(state.step, earlier), window.start):
        next(stream)
    sums: dict[tuple[str, int], tuple[float, int]] = {}
    memories: list[Memory | None] = [None] * len(state.memories)
    lanes_begin = segments_consumed(lanes_since(run, state.step), earlier)
    since_then = range(window.start - lanes_begin, window.stop - lanes_begin)
    pieces = audit_steps(
        corpus, data.lanes, seed, lane_lengths(run, state.step, earlier), since_then, lanes
    )
    for _ in window:
        losses = []
        for slot, part in enumerate(next(stream).split(len(memories))):
            nll_BL, memories[slot] = engine.evaluate(part, memories[slot], run.model.memory_length)
            losses += nll_BL.flatten().tolist()
        _add_losses(sums, pieces, losses)
    _write_suspects(run_dir, engine.world, sums, window)


def _segments_of_phase(run: RunConfig, step: int, windows: list[range]) -> range:
    """The segments of every lane that the phase reads or passes over, counted from the run's beginning."""
    end = next(
        (phase.from_step for phase in run.data.phases if phase.from_step > step), WITHOUT_END
    )
    return range(
        segments_consumed(first_step_at(run, step), windows), segments_consumed(end, windows)
    )


def _open_case(run_dir: RunDir) -> tuple[list[range], range | None]:
    """The windows of earlier rewinds, and that of the last one if its suspects are not named yet."""
    events = events_of(run_dir.ledger.read(), Rewind, SuspectDocuments)
    if not events or isinstance(events[-1], SuspectDocuments):
        return [], None
    return skipped_windows(events[:-1]), range(*events[-1].segments)


def _add_losses(
    sums: dict[tuple[str, int], tuple[float, int]], pieces: Iterable[ReadSpan], losses: list[float]
) -> None:
    """Share out one step's losses, lane after lane, among the documents they belong to."""
    place = 0
    for piece in pieces:
        total, tokens = sums.get((piece.document, piece.lane), (0.0, 0))
        total += sum(losses[place : place + piece.tokens])
        sums[piece.document, piece.lane] = (total, tokens + piece.tokens)
        place += piece.tokens
        if place == len(losses):
            return


def _write_suspects(
    run_dir: RunDir, world: World, sums: dict[tuple[str, int], tuple[float, int]], window: range
) -> None:
    own = [
        SuspectDocument(document=document, lane=lane, loss=total / tokens, tokens=tokens)
        for (document, lane), (total, tokens) in sums.items()
    ]
    gathered: list[Any] = [own]
    if world.world_size > 1:
        gathered = [None] * world.world_size
        dist.all_gather_object(gathered, own)
    if not world.is_main:
        return
    documents = (each for part in gathered for each in part)
    ranked = tuple(sorted(documents, key=lambda each: -each.loss)[:NUM_SUSPECTS])
    segments = (window.start, window.stop)
    run_dir.ledger.append(SuspectDocuments(segments=segments, documents=ranked))
    worst = ", ".join(map(str, ranked))
    logger.warning("recovery: hardest to predict in the skipped segments: %s", worst)


def _report(run: RunConfig, spike: Spike, ledger: Sequence[Event]) -> str:
    rewinds = [f"\n  step {event.step}: {event.spike}" for event in events_of(ledger, Rewind)]
    return (
        f"{spike.describe()}, after {len(rewinds)} rewinds (recovery.max_rewinds={run.recovery.max_rewinds}):"
        f"{''.join(rewinds)}\nlower optim.learning_rate or clean the documents that ledger.jsonl names; "
        "a higher recovery.max_rewinds goes on"
    )
