"""The demo's text: what every Python ships, or a folder of the user's own.

`python -m pretrain.demo.texts FILE` writes the former as JSONL.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.records import Document
from data_pipeline.builder.sources import list_sources
from data_pipeline.config import CorpusConfig
from data_pipeline.errors import DataError, UserError, exit_status_of
from data_pipeline.files import atomic_write

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TOPICS_FILE = "pydoc_data/topics.py"  # its entries are documents of their own
FEWEST_CHARACTERS = 200
FEWEST_BYTES = 2_000_000  # less teaches a model of this size to repeat it
MOST_BYTES = 64_000_000  # more than the demo can read in its minutes
LONGEST_CHARACTERS = 40_000  # of a document: in so small a corpus each lane should get several

Named = tuple[str, str]  # a document's name and text


def standard_library() -> Iterator[Named]:
    """Source files of the standard library, but for its tests and the longest ones, and documentation topics."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.as_posix() == TOPICS_FILE or NOT_LIBRARY & set(name.parts):
            continue
        try:
            with tokenize.open(path) as file:  # heeds the file's own declaration of its encoding
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        if FEWEST_CHARACTERS <= len(text) <= LONGEST_CHARACTERS:
            yield name.as_posix(), text
    yield from documentation_topics()


def documentation_topics() -> Iterator[Named]:
    """What `help('TOPIC')` shows for every topic; nothing where Python was packaged without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(name for name, text in topics.items() if len(text) <= LONGEST_CHARACTERS):
        yield f"topics/{name}", topics[name].lstrip("\n")


def folder_of_text(folder: Path, output: Path) -> Iterator[Named]:
    """The documents of the user's text files and JSONL, long ones in parts; none of `output`, if it lies in there."""
    if not folder.is_dir():
        raise DataError(
            f"--corpus {folder} is no folder; give one with text files (or JSONL) in it"
        )
    config = CorpusConfig(input=(folder,), output=output)
    for source in list_sources((folder,), config):
        for document in read_documents(source, config):
            if isinstance(document, Document):
                yield from in_parts(document.id, document.text)


def in_parts(name: str, text: str) -> Iterator[Named]:
    """The text whole, or cut at ends of paragraphs or lines into documents of at most LONGEST_CHARACTERS."""
    begin, number = 0, 0
    while len(text) - begin > LONGEST_CHARACTERS:
        limit = begin + LONGEST_CHARACTERS
        ends = (
            text.rfind(mark, begin + LONGEST_CHARACTERS // 2, limit) + len(mark)
            for mark in ("\n\n", "\n")
        )
        end = next((end for end in ends if end > begin + LONGEST_CHARACTERS // 2), limit)
        yield f"{name}#{number}", text[begin:end]
        begin, number = end, number + 1
    yield (f"{name}#{number}" if number else name), text[begin:]


def write_jsonl(path: Path, documents: Iterable[Named]) -> dict[str, int]:
    """Write documents one per line, as many as fit into MOST_BYTES; returns their number and the bytes of text."""
    count = num_bytes = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        for name, text in documents:
            size = len(text.encode(errors="replace"))
            if num_bytes + size > MOST_BYTES:
                break
            file.write(json.dumps({"id": name, "text": text}).encode() + b"\n")
            count, num_bytes = count + 1, num_bytes + size
    return {"documents": count, "bytes": num_bytes}


def refuse_too_little(written: dict[str, int], where: str) -> None:
    """DataError if what was written is too little text to learn from."""
    if written["bytes"] < FEWEST_BYTES:
        raise DataError(
            f"{where} holds {written['bytes'] / 1e6:.2f} MB of text in {written['documents']} documents, the demo "
            f"needs {FEWEST_BYTES / 1e6:.0f} MB at least; give a folder with more text (--corpus DIR)"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the standard library's text into the one file named."""

    def write() -> int:
        given = sys.argv[1:] if arguments is None else list(arguments)
        if len(given) != 1:
            raise UserError(
                "expected one argument, the file to write: python -m pretrain.demo.texts FILE.jsonl"
            )
        written = write_jsonl(Path(given[0]), standard_library())
        refuse_too_little(written, "this Python's standard library")
        print(f"{given[0]}: {written['documents']:,} documents, {written['bytes'] / 1e6:.1f} MB")
        return 0

    return exit_status_of(write)


if __name__ == "__main__":
    sys.exit(main())
