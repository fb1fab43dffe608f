"""What is fuzzed: a valid file, and what reads it.

A reader is a command as a user calls it, or the function that a rank calls. It returns what it
read, so that an accepted change can be compared with the valid file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.mutations import Change, changes, json_text, single_edits


class Refused(Exception):
    """A command ended with a status other than 0, after it said why."""


@dataclass(frozen=True)
class Target:
    """A file below `home`, and `read`, which is given the path of a copy of `home`."""

    home: Path
    file: str
    read: Callable[[Path], object]
    parse: Callable[[bytes], Any] | None = json.loads  # None: only its bytes are changed
    write: Callable[[Any], bytes] = json_text
    seal: Callable[[Path], None] | None = None  # repair the checksums over the file
    # With checksums: whatever is accepted unrepaired must read as the valid file does.
    is_protected: bool = True
    names_files: bool = False  # a user's own settings, which say what is read (docs/security.md)
    seconds: float = 0.02  # about what an example takes


def changes_of(target: Target, targets: Mapping[str, Target]) -> st.SearchStrategy[Change]:
    """Changes of the target's file, which may be exchanged with those of the other targets."""
    others = {other.home / other.file for other in targets.values()} - {target.home / target.file}
    return changes(
        (target.home / target.file).read_bytes(),
        [other.read_bytes() for other in sorted(others)],
        target.parse,
        target.write,
    )


def single_changes(target: Target) -> Iterator[Change]:
    """Every single edit of the target's file, with checksums over it where it has any."""
    if target.parse is not None:
        for tree in single_edits(target.parse((target.home / target.file).read_bytes())):
            yield Change(content=target.write(tree), is_sealed=target.seal is not None)


def command(main: Callable[[list[str]], int], *arguments: object) -> None:
    """Run a command; Refused unless its status is 0."""
    status = main([str(argument) for argument in arguments])
    if status:
        assert status in (1, 2), f"exit status {status}"
        raise Refused


def parse_lines(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


def write_lines(tree: Any) -> bytes:
    lines = tree if isinstance(tree, list) else [tree]
    return b"".join(json_text(line) + b"\n" for line in lines)
