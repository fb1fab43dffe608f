"""How fast a corpus is built, compared with SentencePiece alone.

Both use the same text, tokenizer and number of processes. The baseline holds its text in host
memory and discards its tokens. The build reads JSONL, validates it, writes shards with checksums,
syncs them to disk and merges the parts. The time of imports does not count for either.
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

from benchmarks.measure import Measurement, in_turns
from data_pipeline.builder.build_tokenizer import train_tokenizer
from data_pipeline.builder.parallel_build import build_in_processes
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.tokenizer import Tokenizer

BUILD_GOAL = 1 / 0.8  # times the baseline's time: 80% of its rate


@dataclass(frozen=True)
class EncodingSize:
    """How much text, of Python's standard library."""

    megabytes: float = 128  # much, because a build's start and end take a fifth of a second
    training_megabytes: float = 2
    vocab_size: int = 8_000
    processes: int = os.cpu_count() or 1
    rounds: int = 3


def encoding_costs(directory: Path, size: EncodingSize) -> Iterator[Measurement]:
    """Yield both rates, and the build's time over the baseline's."""
    texts = list(library_texts(size.megabytes * 1e6))
    tokenizer = train_tokenizer(
        "unigram", size.vocab_size, library_texts(size.training_megabytes * 1e6)
    )
    tokenizer.save(directory / "tokenizer")
    parts = [texts[number :: size.processes] for number in range(size.processes)]
    for number, part in enumerate(parts):
        _write_jsonl(directory / "text" / f"{number}.jsonl", part)
        _write_jsonl(directory / "little" / f"{number}.jsonl", texts[number : number + 1])
    _build_seconds(directory, "little", size)  # starts the process that all others are forked from
    cases = {
        "SentencePiece alone": lambda: _raw_seconds(directory, size),
        "data-pipeline build": lambda: _build_seconds(directory, "text", size),
    }
    seconds = in_turns(cases, size.rounds)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    what = f"{size.processes} processes, {megabytes:.0f} MB of text, unigram"
    for name, values in seconds.items():
        rates = [megabytes / each for each in values]
        yield Measurement(f"{name}, {what}", rates, "MB/s")
    raw, build = seconds.values()
    ratios = [ours / baseline for ours, baseline in zip(build, raw, strict=True)]
    yield Measurement("time of the build over SentencePiece alone", ratios, at_most=BUILD_GOAL)


def library_texts(num_bytes: float) -> Iterator[str]:
    """Yield files of the standard library, from the first again after the last."""
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
    start = time.perf_counter()
    build_in_processes(config, size.processes)
    seconds = time.perf_counter() - start
    shutil.rmtree(config.output)
    return seconds


def _raw_seconds(directory: Path, size: EncodingSize) -> float:
    """Return the seconds from when all processes have their text until the last has encoded it."""
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
    start = time.perf_counter()
    for connection, _ in running:
        connection.send("go")
    for connection, _ in running:
        connection.recv()
    seconds = time.perf_counter() - start
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
