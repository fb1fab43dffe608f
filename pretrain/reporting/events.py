"""The ledger's events as sentences. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.processes.local_ranks import describe_exit


def describe(event: Mapping[str, Any]) -> str:
    """What happened, for a reader who knows no settings' names."""
    kind = str(event.get("event", ""))
    return _WORDS[kind](event) if kind in _WORDS else kind.replace("_", " ")


def _ranks(event: Mapping[str, Any]) -> str:
    count = event.get("world_size", 0)
    return f"{count} rank{'' if count == 1 else 's'}"


def _rewind(event: Mapping[str, Any]) -> str:
    begin, end = event["segments"]
    skipped = f"passing over segments {begin} to {end - 1} of every lane"
    return f"{event['reason']}: back to step {event['to_step']}, {skipped}"


def _suspects(event: Mapping[str, Any]) -> str:
    named = [
        f"{each['document']} (lane {each['lane']}, loss {each['loss']:.2f})"
        for each in event["documents"][:3]
    ]
    return f"hardest to predict of what was passed over: {', '.join(named)}"


def _attempt_ended(event: Mapping[str, Any]) -> str:
    statuses = event.get("statuses", [])
    ends = ", ".join(
        dict.fromkeys(
            f"rank {rank} {describe_exit(status)}" for rank, status in enumerate(statuses)
        )
    )
    reason = event.get("reason", ends)
    return (
        f"attempt {event.get('attempt', '')} ended: {reason}; then: {event.get('next', 'nothing')}"
    )


def _settings_changed(event: Mapping[str, Any]) -> str:
    changes = [f"{key} from {old} to {new}" for key, (old, new) in event["changes"].items()]
    return f"settings changed: {', '.join(changes)}"


_WORDS = {
    "start": lambda event: f"began on {_ranks(event)}",
    "resume": lambda event: f"went on from step {event['step']} on {_ranks(event)}",
    "stop": lambda event: f"stopped on request after step {event['step']}, saved",
    "finish": lambda event: f"finished after step {event['step']}",
    "rewind": _rewind,
    "suspects": _suspects,
    "gave_up": lambda event: f"gave up: {event['reason']}",
    "out_of_memory": lambda event: (
        f"rank {event['rank']} was out of memory with {event['micro_batch_lanes']} lanes per forward pass; halved"
    ),
    "straggler": lambda event: (
        f"rank {event['rank']} took {event['ratio']:.1f} times as long as the others"
    ),
    "settings_changed": _settings_changed,
    "attempt_ended": _attempt_ended,
    "submitted": lambda event: f"submitted to Slurm as job {event.get('job')}",
    "cancelled": lambda event: f"cancelled (job {event.get('job')})",
}
