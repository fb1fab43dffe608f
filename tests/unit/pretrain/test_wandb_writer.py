from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from foundation.records import from_json
from pretrain.metrics.wandb_writer import Sent


def lines(*steps: int, kind: str = "train") -> list[dict[str, Any]]:
    return [{"kind": kind, "step": step} for step in steps]


def places(sent: Sent, found: list[dict[str, Any]]) -> list[int | None]:
    """The rows of the lines; None for those that were sent before."""
    rows: list[int | None] = []
    for line in found:
        if is_new := sent.lacks(line):
            sent.add(line)
        rows.append(sent.row if is_new else None)
    return rows


def next_session(sent: Sent) -> Sent:
    """What the next attempt reads of the file that this one wrote."""
    return replace(from_json(Sent, asdict(sent)), takes_more=False)


def test_steps_that_a_crash_repeats_are_sent_once():
    sent = Sent()
    assert places(sent, lines(1, 2, 3, 4)) == [1, 2, 3, 4]
    sent = next_session(sent)
    assert places(sent, lines(1, 2, 3, 4, 5)) == [None, None, None, None, 5]


def test_an_evaluation_shares_the_row_of_its_step_but_not_one_of_an_earlier_session():
    sent = Sent()
    evaluation = lines(2, kind="evaluation")
    assert places(sent, [*lines(1, 2), *evaluation, *lines(3)]) == [1, 2, 2, 3]
    sent = Sent()
    places(sent, lines(1, 2))
    sent = next_session(sent)
    assert places(sent, [*lines(1, 2), *evaluation, *lines(3, 4)]) == [None, None, 3, 4, 5]


def test_steps_after_a_rewind_are_sent_again_and_their_places_grow():
    sent = Sent()
    places(sent, [*lines(1, 2, 3, 4), *lines(4, kind="evaluation")])
    sent.note_rewinds([2])
    again = [*lines(1, 2, 3, 4), *lines(4, kind="evaluation")]
    assert places(sent, again) == [None, None, 5, 6, 6]
    sent.note_rewinds([2])
    assert places(sent, lines(3, 4, 5)) == [None, None, 7], "the same rewind, read again"
    sent.note_rewinds([2, 4])
    assert places(sent, lines(4, 5)) == [None, 8]
