from __future__ import annotations

from dataclasses import asdict
from typing import Any

from data_pipeline.typed_json import from_json
from pretrain.metrics.wandb_steps import SentSteps


def lines(*steps: int, kind: str = "train") -> list[dict[str, Any]]:
    return [{"kind": kind, "step": step} for step in steps]


def places(sent: SentSteps, found: list[dict[str, Any]]) -> list[int | None]:
    return [sent.place_of(line) for line in found]


def next_session(sent: SentSteps) -> SentSteps:
    """What the next attempt reads of the file that this one wrote."""
    later = from_json(SentSteps, asdict(sent))
    later.start_session()
    return later


def test_steps_that_a_crash_repeats_are_sent_once():
    sent = SentSteps()
    assert places(sent, lines(1, 2, 3, 4)) == [1, 2, 3, 4]
    sent = next_session(sent)
    assert places(sent, lines(1, 2, 3, 4, 5)) == [None, None, None, None, 5]


def test_an_evaluation_shares_the_row_of_its_step_but_not_one_of_an_earlier_session():
    sent = SentSteps()
    evaluation = lines(2, kind="evaluation")
    assert places(sent, [*lines(1, 2), *evaluation, *lines(3)]) == [1, 2, 2, 3]
    sent = SentSteps()
    places(sent, lines(1, 2))
    sent = next_session(sent)
    assert places(sent, [*lines(1, 2), *evaluation, *lines(3, 4)]) == [None, None, 3, 4, 5]


def test_steps_after_a_rewind_are_sent_again_and_their_places_grow():
    sent = SentSteps()
    places(sent, [*lines(1, 2, 3, 4), *lines(4, kind="evaluation")])
    sent.note_rewinds([2])
    again = [*lines(1, 2, 3, 4), *lines(4, kind="evaluation")]
    assert places(sent, again) == [None, None, 5, 6, 6]
    sent.note_rewinds([2])
    assert places(sent, lines(3, 4, 5)) == [None, None, 7], "the same rewind, read again"
    sent.note_rewinds([2, 4])
    assert places(sent, lines(4, 5)) == [None, 8]
