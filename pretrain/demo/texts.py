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
from data_pipeline.builder.records import Document, DocumentRules
from data_pipeline.builder.sources import SourceFile, list_sources
from data_pipeline.config import CorpusConfig
from data_pipeline.errors import DataError, UserError, exit_status_of
from data_pipeline.files import atomic_write

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TOPICS_FILE = "pydoc_data/topics.py"  # its entries become documents of their own
MIN_CHARACTERS = 200  # of a document
MAX_CHARACTERS = 40_000  # of a document: in so small a corpus each lane should read several
MIN_BYTES = 2_000_000  # of all text: a model of this size would memorize less
MAX_BYTES = 64_000_000  # of all text: the demo has no time to read more

Named = tuple[str, str]  # a document's name and text


def standard_library() -> Iterator[Named]:
    """Yield the standard library's sources, without tests and the longest files, and its topics."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.as_posix() == TOPICS_FILE or NOT_LIBRARY & set(name.parts):
            continue
        try:
            with tokenize.open(path) as file:  # decodes as the file itself declares
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
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


def files_of_folder(folder: Path, output: Path) -> list[SourceFile]:
    """Return the user's files, without those in `output`, which may be a folder in `folder`."""
    if not folder.is_dir():
        raise DataError(f"--corpus {folder} is not a folder; give one with text files or JSONL")
    return list_sources((folder,), _config(folder, output))


def documents_of_folder(folder: Path, output: Path) -> Iterator[Named]:
    """Yield the documents of `files_of_folder`, long ones in parts; unusable ones are skipped."""
    config = _config(folder, output)
    rules = DocumentRules(config)
    for file in files_of_folder(folder, output):
        for document in read_documents(file, config):
            if isinstance(document, Document):
                yield from ((part.id, part.text) for part in rules.apply(document))


def _config(folder: Path, output: Path) -> CorpusConfig:
    return CorpusConfig(input=(folder,), output=output, split_characters=MAX_CHARACTERS)


def write_jsonl(path: Path, documents: Iterable[Named], source: str) -> str:
    """Write documents one per line, up to MAX_BYTES of text; return a summary.

    Raises DataError if there is too little text to learn from; `source` says where it came from.
    """
    count = num_bytes = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        for name, text in documents:
            size = len(text.encode(errors="replace"))
            if num_bytes + size > MAX_BYTES:
                break
            file.write(json.dumps({"id": name, "text": text}).encode() + b"\n")
            count, num_bytes = count + 1, num_bytes + size
    if num_bytes < MIN_BYTES:
        raise DataError(
            f"found {num_bytes / 1e6:.2f} MB of text in {count} documents of {source}, expected at "
            f"least {MIN_BYTES / 1e6:.0f} MB; give a folder with more text (--corpus DIR)"
        )
    return f"{count:,} documents, {num_bytes / 1e6:.1f} MB, from {source}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the standard library's text to the file named on the command line."""

    def write() -> int:
        given = sys.argv[1:] if arguments is None else list(arguments)
        if len(given) != 1:
            raise UserError(
                f"found {len(given)} arguments, expected one, the file to write: "
                "python -m pretrain.demo.texts FILE.jsonl"
            )
        source = "this Python's standard library"
        print(f"{given[0]}: {write_jsonl(Path(given[0]), standard_library(), source)}")
        return 0

    return exit_status_of(write)


if __name__ == "__main__":
    sys.exit(main())
