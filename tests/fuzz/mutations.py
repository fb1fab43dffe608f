"""Hostile versions of a file: damaged bytes, documents with hostile values, and no files."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

MOST_EDITS = 3
CANARY = "canary"  # a directory beside the one that is read
CONTENT = "content"

# Text that json.dumps would not write: it takes the place of "@raw N@".
RAW = (
    *("[" * 3_000 + "]" * 3_000, '{"a":' * 3_000 + "1" + "}" * 3_000, "[" * 200_000),
    *("9" * 5_000, "-" + "9" * 5_000, "1e999", "-1e999", "1e-999", "0x1F", "007", "1_000", "-"),
    *("", "nul", "'x'", '"\\', '"\x00"', '"\x1b[31m"', '"\\ud800"', '"\\u0000"', '{"a":1,"a":2}'),
    *("&a [*a]", "*a", "!!python/object/apply:os.system [id]", "2026-99-99", "12:30:45", "<<: x"),
    *("&a [1,1,1,1,1,1,1,1,1]", "? [x]\n: y", "!!binary x", "!!set {x}", "~", "\t", "%YAML 9"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 255, 65535, 65536, 2**31, -(2**31), 2**53, 2**63, 10**30),
    *(0.5, -0.0, 1e-320, 1e9, 1e308, float("inf"), float("-inf"), float("nan"), -(2**63) - 1),
    *("", " ", "x", "0", "1", "-1", "1e3", "NaN", "null", "true", "f" * 64, "0" * 64, "a" * 70_000),
    *(f"../{CANARY}/file", f"../../{CANARY}/file", f"../../../{CANARY}/file", "../" * 40 + "etc"),
    *("/", ".", "..", "/etc/passwd", "/dev/zero", "/dev/stdin", "//x", "a/../b", "shard/../x"),
    *("a\x00b", "a\nb", "a\r\nb", "\x1b[31mred\x1b[0m", "\x9b31m", "\u202eabc", "\ud800"),
    "é" * 300,
    *("$x$", "$\\frac{", "%j", "%s%n", "{}", "{0.__class__}", "~", "=1+1", "-oX", "--help", "a b"),
    *("http://127.0.0.1:9/x", "s3://x/y", "file:///etc/passwd", "env:HOME", "2026-99-99T99:99:99"),
    *("9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+00:00", "1" * 5_000, "nan", "inf"),
    *([], {}, [[]], [None], ["x"], [-1], {"x": 1}, {"": None}, {"a\nb": "\x1b"}, [1, [2, [3]]]),
)

# One value of each kind that JSON has.
KINDS = (None, True, 0, -1, 2**63, 0.5, float("nan"), "", "x", "1", [], ["x"], {}, {"x": 1})


@dataclass(frozen=True)
class Change:
    """What takes the place of a file."""

    kind: str = CONTENT  # or a name of _NODES
    content: bytes = b""
    is_sealed: bool = False  # whether the checksums over it are repaired

    def apply(self, path: Path) -> None:
        """Replace the file at `path`."""
        path.unlink(missing_ok=True)
        if self.kind == CONTENT:
            path.write_bytes(self.content)
        else:
            _NODES[self.kind](path)

    def to_tree(self) -> dict[str, Any]:
        """Return the change for a JSON file, from which `of_tree` makes it again."""
        content = base64.b64encode(self.content).decode()
        return {"kind": self.kind, "content": content, "is_sealed": self.is_sealed}

    @classmethod
    def of_tree(cls, tree: dict[str, Any]) -> Change:
        return cls(tree["kind"], base64.b64decode(tree["content"]), tree["is_sealed"])


def _bind_socket(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY)  # the whole path may be too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    finally:
        os.close(descriptor)


_NODES: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "socket": _bind_socket,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to endless zeros": lambda path: path.symlink_to("/dev/zero"),
}


def changes(
    valid: bytes,
    others: Sequence[bytes],
    parse: Callable[[bytes], Any] | None,
    write: Callable[[Any], bytes],
) -> st.SearchStrategy[Change]:
    """Every kind of change of a valid file; `others` are files to exchange it with.

    `parse` makes a tree of it, whose nodes are changed, and `write` makes a file of a tree.
    """
    contents = [damaged_bytes(valid), _rewritten(valid), st.sampled_from(list(others))]
    if parse is not None:
        contents += [hostile_trees(parse(valid)).map(write)] * 4
    sealed = st.builds(Change, st.just(CONTENT), st.one_of(contents), st.booleans())
    nodes = st.builds(Change, st.sampled_from(list(_NODES)))
    return st.integers(0, 39).flatmap(lambda number: nodes if number == 39 else sealed)


def damaged_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with a few of them flipped, removed, repeated or replaced, or cut short."""
    places = st.integers(0, max(0, len(content) - 1))
    edit = st.tuples(places, st.integers(0, 40), st.binary(max_size=8), st.integers(0, 255))

    def apply(edits: list[tuple[int, int, bytes, int]]) -> bytes:
        damaged = bytearray(content)
        for place, length, inserted, bits in edits:
            place = min(place, len(damaged))
            if bits < 128 and place < len(damaged):
                damaged[place] ^= 1 << bits % 8
            elif bits < 160:
                del damaged[place : place + length]
            elif bits < 192:
                damaged[place:place] = damaged[place : place + length] * 2
            elif bits < 240:
                damaged[place : place + len(inserted)] = inserted
            else:
                del damaged[place:]
        return bytes(damaged)

    return st.lists(edit, min_size=1, max_size=MOST_EDITS).map(apply)


def _rewritten(content: bytes) -> st.SearchStrategy[bytes]:
    """The same text in another encoding or twice, zeros, and other whole files."""
    text = content.decode(errors="replace")
    return st.sampled_from(
        [
            *(b"", b"\n", b"\x00", b"null", b"[]", b"{}", b"0", b'"x"', b"\xff\xfe", bytes(4096)),
            *(text.encode(encoding, "replace") for encoding in ("utf-16", "utf-8-sig", "utf-32")),
            *(content * 2, content + b"\x00", content.replace(b"\n", b"\r\n"), content[::-1]),
            *(raw.encode(errors="replace") for raw in RAW),
        ]
    )


def hostile_trees(tree: Any) -> st.SearchStrategy[Any]:
    """The tree with some of its nodes replaced, removed, added, renamed or exchanged."""
    places = _places(tree)
    raws = [f"@raw {number}@" for number in range(len(RAW))]
    values = st.one_of(st.sampled_from(VALUES), st.sampled_from(raws), st.integers(), st.text())
    edit = st.tuples(st.sampled_from(places), st.sampled_from(_EDITS), values)

    def apply(edits: list[tuple[tuple[Any, ...], Callable[..., None], Any]]) -> Any:
        edited = copy.deepcopy(tree)
        for place, change, value in edits:
            edited = _edited(edited, place, change, copy.deepcopy(value))
        return edited

    return st.lists(edit, min_size=1, max_size=MOST_EDITS).map(apply)


def single_edits(tree: Any) -> Iterator[Any]:
    """Yield the tree once for each node and each kind of value in its place, and without it."""
    for place in _places(tree):
        for value in KINDS:
            yield _edited(copy.deepcopy(tree), place, _replace, copy.deepcopy(value))
        if place:
            yield _edited(copy.deepcopy(tree), place, _remove, None)


def json_text(tree: Any) -> bytes:
    """The tree as JSON, with RAW text where a node says so."""
    text = re.sub(r'"@raw (\d+)@"', lambda match: RAW[int(match[1])], json.dumps(tree))
    return text.encode("utf-8", "surrogatepass")


def _places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children: Any = ()
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list):
        children = list(enumerate(tree))[:4]
    return [at, *(place for key, value in children for place in _places(value, (*at, key)))]


def _edited(tree: Any, place: tuple[Any, ...], edit: Callable[..., None], new: Any) -> Any:
    """Edit the node at `place`, unless an earlier edit has removed it."""
    if not place:
        return new if edit is _replace else tree
    parent = tree
    try:
        for key in place[:-1]:
            parent = parent[key]
        edit(parent, place[-1], new)
    except (LookupError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        pass
    return tree


def _replace(parent: Any, key: Any, new: Any) -> None:
    parent[key] = new


def _remove(parent: Any, key: Any, new: Any) -> None:
    del parent[key]


def _add(parent: Any, key: Any, new: Any) -> None:
    if isinstance(parent, dict):
        parent[new if isinstance(new, str) else f"{key}_"] = copy.deepcopy(parent[key])
    else:
        parent.insert(key, new)


def _repeat(parent: Any, key: Any, new: Any) -> None:
    if isinstance(parent, dict):  # json.dumps writes both keys, of which one is not text
        parent[_Same(key)] = new
    else:
        parent.insert(key, copy.deepcopy(parent[key]))


def _exchange(parent: Any, key: Any, new: Any) -> None:
    others = list(parent if isinstance(parent, dict) else range(len(parent)))
    other = others[len(repr(new)) % len(others)]
    parent[key], parent[other] = parent[other], parent[key]


def _nudge(parent: Any, key: Any, new: Any) -> None:
    parent[key] = parent[key] + (1 if new else -1)


class _Same(str):
    """A key that a dict holds besides an equal one."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


_EDITS = (_replace, _replace, _replace, _remove, _add, _repeat, _exchange, _nudge)
