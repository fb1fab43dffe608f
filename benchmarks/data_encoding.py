"""How fast a corpus is built beside SentencePiece alone: the same text, tokenizer and number of processes.

The baseline has its text in memory and throws its tokens away; the build reads JSONL, checks it, writes shards with
checksums, syncs them to disk and merges the parts. The time in which modules are imported counts for neither.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.data_measure import Row, medians
from data_pipeline.builder.processes import build_in_processes
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.tokenizer import Tokenizer, train_tokenizer

BUILD_GOAL = 1 / 0.8  # of the baseline's time: 80 % of its rate


@dataclass(frozen=True)
class EncodingSize:
    """How much text, from the library that comes with Python."""

    megabytes: float = (
        128  # a rate: start and end of a build, a fifth of a second, are little beside it
    )
    training_megabytes: float = 2
    vocab_size: int = 8_000
    processes: int = os.cpu_count() or 1
    rounds: int = 3


def encoding_rows(directory: Path, size: EncodingSize) -> list[Row]:
    """The time of a build over that of the baseline."""
    texts = list(_texts(size.megabytes * 1e6))
    tokenizer = train_tokenizer("unigram", size.vocab_size, _texts(size.training_megabytes * 1e6))
    tokenizer.save(directory / "tokenizer")
    parts = [texts[number :: size.processes] for number in range(size.processes)]
    for number, part in enumerate(parts):
        _write_jsonl(directory / "text" / f"{number}.jsonl", part)
    _write_jsonl(directory / "little" / "0.jsonl", texts[:1])
    _build_seconds(directory, "little", size)  # starts the process that the others are forked from
    seconds = medians(
        {
            "raw": lambda: _raw_seconds(directory, size),
            "build": lambda: _build_seconds(directory, "text", size),
        },
        size.rounds,
    )
    num_bytes = sum(len(text.encode()) for text in texts)
    what = f"of {size.processes} processes, {num_bytes / 1e6:.0f} MB of text, unigram"
    return [
        Row(f"SentencePiece alone, {what}", num_bytes / 1e6 / seconds["raw"], 0, "MB/s"),
        Row(f"data-pipeline build, {what}", num_bytes / 1e6 / seconds["build"], 0, "MB/s"),
        Row(
            "time of the build over SentencePiece alone",
            seconds["build"] / seconds["raw"],
            BUILD_GOAL,
            "x",
        ),
    ]


def _texts(num_bytes: float) -> Iterator[str]:
    """Files of the standard library, again from the first when there are no more."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    while True:
        for path in paths:
            text = path.read_text(errors="replace")
            if text.strip():
                yield text
                num_bytes -= len(text.encode())
            if num_bytes <= 0:
                return


def _write_jsonl(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _build_seconds(directory: Path, folder: str, size: EncodingSize) -> float:
    config = CorpusConfig(
        input=(directory / folder,),
        output=directory / "corpus",
        validation_fraction=0.0,
        tokenizer=TokenizerConfig(path=directory / "tokenizer"),
    )
    begin = time.perf_counter()
    build_in_processes(config, size.processes)
    seconds = time.perf_counter() - begin
    shutil.rmtree(config.output)
    return seconds


def _raw_seconds(directory: Path, size: EncodingSize) -> float:
    """From when every process has its text in memory until the last one has encoded it."""
    context = multiprocessing.get_context("forkserver")
    running = []
    for number in range(size.processes):
        ours, theirs = context.Pipe()
        path = directory / "text" / f"{number}.jsonl"
        process = context.Process(
            target=_encode, args=(theirs, path, directory / "tokenizer"), daemon=True
        )
        process.start()
        running.append((ours, process))
    for connection, _ in running:
        connection.recv()
    begin = time.perf_counter()
    for connection, _ in running:
        connection.send("go")
    for connection, _ in running:
        connection.recv()
    seconds = time.perf_counter() - begin
    for _, process in running:
        process.join()
    return seconds


def _encode(connection: Connection, path: Path, tokenizer: Path) -> None:
    import sentencepiece

    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    processor = sentencepiece.SentencePieceProcessor(model_proto=Tokenizer.load(tokenizer).model)
    connection.send("ready")
    connection.recv()
    processor.encode(texts, return_type="numpy", num_threads=1)
    connection.send("done")
