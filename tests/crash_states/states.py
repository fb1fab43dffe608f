"""What may be on disk after a power failure, by three models of file systems.

Names, of those that no fsync has made durable:
    J  journal (ext4, XFS): any fsync makes all earlier ones durable; a prefix of the others
    B  an fsync makes the file's own name and its directories' durable; a prefix of the others
    S  strict POSIX: only an fsync of the directory does; each one alone, or missing, none, all
Data since the file's last fsync: none, the first half, zeros, a page missing, all.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.crash_states.recorder import ROOT, Data, Names, Recording, Sync, Told

MODELS = "JBS"
UNSYNCED = ("all", "none", "half", "zeros", "hole")
PAGE = 4096
DRAWS = 6  # of each state that is wanted: many are the same on disk
Tree = dict[str, bytes | None]  # path -> contents; None: a directory


@dataclass(frozen=True)
class Moment:
    """A crash after operation `end`: names that are durable, and those that may be."""

    model: str
    end: int
    durable: frozenset[int]
    others: tuple[int, ...]


Draw = tuple[Moment, tuple[int, ...], str]


class History:
    """A recording, from which any state can be made."""

    def __init__(self, recording: Recording) -> None:
        self._operations, self._directories = recording.operations, recording.directories
        are_told = (isinstance(operation, Told) for operation in self._operations)
        self._num_told = list(itertools.accumulate(are_told, initial=0))

    def moments(self, model: str) -> Iterator[Moment]:
        """After each operation that changes something."""
        durable: set[int] = set()
        pending: list[int] = []
        names: dict[tuple[int, str], int] = {}
        for end, operation in enumerate(self._operations):
            match operation:
                case Names(entries):
                    pending.append(end)
                    for key, number in entries.items():
                        if number is None:
                            names.pop(key, None)
                        else:
                            names[key] = number
                case Sync(number):
                    done = [each for each in pending if self._is_synced(model, each, number, names)]
                    durable.update(done)
                    pending = [each for each in pending if each not in durable]
                case _:
                    pass
            yield Moment(model, end + 1, frozenset(durable), tuple(pending))

    def _is_synced(
        self, model: str, index: int, number: int, names: dict[tuple[int, str], int]
    ) -> bool:
        operation = self._operations[index]
        assert isinstance(operation, Names)
        # A rename is one change; between two directories it is durable with its target.
        keys = [key for key, new in operation.entries.items() if new is not None]
        keys = keys or list(operation.entries)
        if model == "J":
            return True
        if any(directory == number for directory, _ in keys):
            return True
        if model == "S":
            return False
        own, child = set(), number
        while child != ROOT and (key := next((k for k, n in names.items() if n == child), None)):
            own.add(key)
            child = key[0]
        return any(key in own for key in keys)

    def choices(self, moment: Moment) -> list[tuple[int, ...]]:
        """Which of the other names may be there."""
        others = moment.others
        prefixes = [others[:length] for length in range(len(others) + 1)]
        if moment.model != "S":
            return prefixes
        alone = [(each,) for each in others]
        missing = [tuple(o for o in others if o != each) for each in others]
        return list(dict.fromkeys([(), others, *alone, *missing]))

    def tree(self, moment: Moment, chosen: tuple[int, ...], unsynced: str) -> Tree:
        """What is on disk."""
        entries: dict[int, dict[str, int]] = {}
        for index in sorted({*moment.durable, *chosen}):
            operation = self._operations[index]
            assert isinstance(operation, Names)
            for (directory, name), number in operation.entries.items():
                if number is None:
                    entries.get(directory, {}).pop(name, None)
                else:
                    entries.setdefault(directory, {})[name] = number
        synced, now = self._data(moment.end)
        tree: Tree = {}
        todo = [(ROOT, "")]
        while todo:
            directory, path = todo.pop()
            for name, number in entries.get(directory, {}).items():
                below = f"{path}{name}"
                if number in self._directories:
                    tree[below] = None
                    todo.append((number, f"{below}/"))
                else:
                    tree[below] = _left(synced.get(number, b""), now.get(number, b""), unsynced)
        return tree

    def _data(self, end: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
        if not hasattr(self, "_at"):
            self._at: list[tuple[dict[int, bytes], dict[int, bytes]]] = [({}, {})]
            for operation in self._operations:
                synced, now = self._at[-1]
                match operation:
                    case Data(file, content):
                        now = {**now, file: content}
                    case Sync(file) if file in now:
                        synced = {**synced, file: now[file]}
                    case _:
                        pass
                self._at.append((synced, now))
        return self._at[end]

    def final(self) -> Tree:
        """All of it, as it was at the end."""
        *_, last = self.moments("J")
        return self.tree(last, last.others, "all")

    def told(self, end: int) -> list[object]:
        """What was told until then."""
        return [each.what for each in self._operations[:end] if isinstance(each, Told)]

    def states(self, limit: int, seed: int = 0) -> Iterator[tuple[str, Tree, set[int]]]:
        """Different states, at most `limit` of a model, or all of them without a limit (0).

        With moments that lead to each: one for each number of things that had been told.
        """
        generator = random.Random(seed)
        seen: dict[int, set[int]] = {}  # of each tree, how much had been told
        for model in MODELS:
            moments = list(self.moments(model))
            found: dict[int, tuple[Tree, dict[int, int]]] = {}
            draws = self._sample(moments, generator, limit) if limit else self._all(moments)
            for moment, chosen, unsynced in draws:
                tree, num_told = self.tree(moment, chosen, unsynced), self._num_told[moment.end]
                key = hash(frozenset(tree.items()))  # bytes keep their hash
                if num_told in seen.get(key, ()):
                    continue
                if key not in found and limit and len(found) == limit:
                    continue
                found.setdefault(key, (tree, {}))[1][num_told] = moment.end
            for key, (_, ends) in found.items():
                seen.setdefault(key, set()).update(ends)
            # Neighbours differ little, so that less has to be written.
            for tree, ends in sorted(found.values(), key=lambda state: min(state[1].values())):
                yield model, tree, set(ends.values())

    def _all(self, moments: list[Moment]) -> Iterator[Draw]:
        for moment in moments:
            yield from itertools.product((moment,), self.choices(moment), UNSYNCED)

    def _sample(
        self, moments: list[Moment], generator: random.Random, limit: int
    ) -> Iterator[Draw]:
        """Draws for `limit` states, at all moments alike."""
        for _ in range(DRAWS * limit):
            moment = generator.choice(moments)
            yield moment, generator.choice(self.choices(moment)), generator.choice(UNSYNCED)


def _left(synced: bytes, now: bytes, unsynced: str) -> bytes:
    """What a file has that had `synced` at its last fsync, and `now` in memory."""
    if synced == now or unsynced == "all":
        return now
    start = len(synced) if now.startswith(synced) else 0
    written = len(now) - start
    match unsynced:
        case "none":
            return synced
        case "half":
            return now[: start + written // 2]
        case "zeros":
            return now[:start] + bytes(written)
        case _:  # the first page that was written to, as far as it was
            end = min(len(now), (start // PAGE + 1) * PAGE)
            return now[:start] + bytes(end - start) + now[end:]
