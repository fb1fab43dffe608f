"""The text of the demos: the sources and documentation that every Python ships.

`python -m benchmarks.texts FILE` writes it as JSONL; with `--all` also tests and the longest files.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from foundation.errors import DataError, exit_status_of
from foundation.files import atomic_write

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
TESTS = {"test", "tests", "idle_test"}
TOPICS_FILE = "pydoc_data/topics.py"  # its entries become documents of their own
MIN_CHARACTERS = 200  # of a document
MAX_CHARACTERS = 40_000  # of a document: in so small a corpus each lane should read several
MIN_BYTES = 2_000_000  # of all text: the demo's model would memorize a smaller one

Named = tuple[str, str]  # a document's name and text


def standard_library(*, is_whole: bool = False) -> Iterator[Named]:
    """Yield the standard library's sources, and its topics; tests and the longest files only if it
    is to be whole.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out, most = (
        (NOT_LIBRARY, sys.maxsize) if is_whole else (NOT_LIBRARY | TESTS, MAX_CHARACTERS)
    )
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.as_posix() == TOPICS_FILE or left_out & set(name.parts):
            continue
        try:
            with tokenize.open(path) as file:  # decodes as the file itself declares
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        if MIN_CHARACTERS <= len(text) <= most:
            yield name.as_posix(), text
    yield from documentation_topics()


def documentation_topics() -> Iterator[Named]:
    """Yield what `help('TOPIC')` shows; nothing if Python was packaged without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(name for name, text in topics.items() if len(text) <= MAX_CHARACTERS):
        yield f"topics/{name}", topics[name].lstrip("\n")


def write_jsonl(path: Path, documents: Iterable[Named]) -> str:
    """Write documents one per line; return a summary. DataError if there is too little text."""
    count = num_bytes = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        for name, text in documents:
            file.write(json.dumps({"id": name, "text": text}).encode() + b"\n")
            count, num_bytes = count + 1, num_bytes + len(text.encode(errors="replace"))
    if num_bytes < MIN_BYTES:
        raise DataError(
            f"found {num_bytes / 1e6:.2f} MB of text in {count} documents of Python, expected "
            f"at least {MIN_BYTES / 1e6:.0f} MB; use a Python with its whole standard library"
        )
    return f"{count:,} documents, {num_bytes / 1e6:.1f} MB, from Python's library"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the standard library's text to the file named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.texts")
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--all", action="store_true", help="tests and the longest files, too")
    parsed = parser.parse_args(arguments)

    def write() -> int:
        summary = write_jsonl(parsed.file, standard_library(is_whole=parsed.all))
        print(f"{parsed.file}: {summary}")
        return 0

    return exit_status_of(write)


if __name__ == "__main__":
    sys.exit(main())
