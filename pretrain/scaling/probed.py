"""What the comparison takes of a run's probes.json, which may be another user's. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foundation.errors import DataError
from foundation.files import read_json
from foundation.records import Fields, InvalidField

PROBES = "probes.json"
PROBED = "probes/"  # begins the names of columns
FAR = 512  # tokens: a position from which much of a document may be out of a short memory


@dataclass(frozen=True)
class Probed:
    """Loss by position in the document with the training's memory, X bins, and needles."""

    first_positions_X: tuple[int, ...]  # each bin ends before the next
    losses_X: tuple[float, ...]
    tokens_X: tuple[int, ...]
    needle: dict[int, float]  # distance, a power of two -> accuracy
    chance: float


def read_probed(run: Path, step: int | None = None) -> Probed | None:
    """Return the probes of a run; DataError if they are missing or damaged.

    None if they are of another step, or lack position or needle.
    """
    path = run / PROBES
    remedy = "'pretrain evaluate RUN --probe needle position' writes it"
    try:
        tree = Fields(read_json(path))
        probes = tree.object("probes")
        is_final = step in (None, tree.integer("step"))
        return (
            _parsed(probes)
            if is_final and probes.has("position") and probes.has("needle")
            else None
        )
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {remedy}") from None
    except (OSError, ValueError, InvalidField) as error:
        raise DataError(f"{path} is damaged ({error}); remove it: {remedy}") from None


def _parsed(probes: Fields) -> Probed:
    positions, needles = probes.items("position"), probes.items("needle")
    if not positions or not needles:
        raise InvalidField("position or needle is empty")
    first, tokens = (positions[0].integers(name) for name in ("first_positions", "tokens"))
    losses = positions[0].numbers("losses")
    if not len(first) == len(tokens) == len(losses) > 0:
        raise InvalidField("position has lists of different lengths")
    found = {each.integer("distance", 1): each.number("accuracy") for each in needles}
    needle = {each: accuracy for each, accuracy in found.items() if not each & (each - 1)}
    return Probed(tuple(first), tuple(losses), tuple(tokens), needle, needles[0].number("chance"))


def probe_columns(run: Path, step: int) -> dict[str, float]:
    """The probes as columns of a table of runs; none of a run not probed after this step.

    `far_loss` is the loss of tokens with at least FAR tokens of their document before them.
    """
    if not (run / PROBES).exists() or (found := read_probed(run, step)) is None:
        return {}
    bins = zip(found.first_positions_X, found.losses_X, found.tokens_X, strict=True)
    bins = [each for each in bins if each[2]]
    columns = {f"position/{first}": loss for first, loss, _ in bins}
    columns |= {f"needle/{distance}": each for distance, each in found.needle.items()}
    columns["chance"] = found.chance
    far = [(loss, count) for first, loss, count in bins if first >= FAR]
    if far:
        tokens = sum(count for _, count in far)
        columns["far_loss"] = sum(loss * count for loss, count in far) / tokens
    return {PROBED + name: value for name, value in columns.items()}
