"""Documents to tokens to shards: deterministic, and resumable after a crash at any moment with the same bytes.

Output: tokenizer/, train/ and validation/ (each shards, index.json for stock readers, manifest.json last), build.json,
rejects.jsonl if any record was unusable. A document's tokens are its encoding followed by one end-of-document token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.builder.document_rules import DocumentRules
from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.journal import (
    BuildJournal,
    check_recipe,
    claimed_output,
    is_finished,
    read_counts,
)
from data_pipeline.builder.records import Document, Reject
from data_pipeline.builder.reject_list import REJECTS_NAME, RejectList
from data_pipeline.builder.sources import SourceFile, list_sources
from data_pipeline.builder.split_writer import SplitWriter
from data_pipeline.builder.train_tokenizer import is_validation, needs_training, prepare_tokenizer
from data_pipeline.config import CorpusConfig
from data_pipeline.config_loader import to_tree
from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    Manifest,
    read_manifest,
)
from data_pipeline.errors import DataError
from data_pipeline.files import fsync_file, named_errors
from data_pipeline.progress import Progress, Report
from data_pipeline.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 22  # encoded together: enough for all threads, little enough to hold
# Where a corpus lies, or how fast and patiently it is built, does not change it.
NOT_IN_RECIPE = ("input", "validation_input", "output", "threads", "max_rejects")


@dataclass(frozen=True)
class BuildResult:
    """What is now on disk."""

    manifests: dict[str, Manifest]  # by split
    rejects: int
    was_finished: bool = False  # nothing had to be done
    duplicates: int = 0  # documents dropped because their text came before
    split_documents: int = 0  # documents cut into several


@dataclass(frozen=True, slots=True)
class _Job:
    """A document on its way into a split."""

    split: str
    document: Document


def build_corpus(config: CorpusConfig, report: Report = lambda what: None) -> BuildResult:
    """Build the corpus that `config` describes, or go on where a killed build left off; `report` gets progress lines.

    Raises ConfigError or DataError for what the user can put right; OSError when the disk is full. In all these cases
    no manifest has been written, and the same call goes on with what is finished.
    """
    return build_sources(config, list_all_sources(config), report)


def list_all_sources(config: CorpusConfig) -> list[tuple[str, SourceFile]]:
    """Every input file in its order, with the split it is for: "validation", or "" where each document decides."""
    sources = [("", source) for source in list_sources(config.input, config)]
    if config.validation_input:
        sources += [
            ("validation", source) for source in list_sources(config.validation_input, config)
        ]
    return sources


def build_sources(
    config: CorpusConfig,
    sources: list[tuple[str, SourceFile]],
    report: Report = lambda what: None,
    is_part: bool = False,
    seen: Iterable[bytes] = (),
) -> BuildResult:
    """As `build_corpus`, of these files alone; the splits of a part may be empty. `seen`: see DocumentRules."""
    recipe = recipe_of(config, sources)
    with claimed_output(config.output) as output:
        if is_finished(output):
            check_recipe(output, recipe)
            return result_of(output, was_finished=True)
        journal = BuildJournal(output, recipe, youngest(sources))
        report(f"tokenizer: {tokenizer_plan(config)}")
        training_sources = [source for split, source in sources if split != "validation"]
        tokenizer = prepare_tokenizer(output / TOKENIZER_DIRECTORY, training_sources, config)
        rules = DocumentRules(config, seen)
        _write_splits(config, sources, tokenizer, rules, journal, report, is_part)
        journal.finish({"duplicates": rules.duplicates, "split_documents": rules.split_documents})
        return result_of(output)


def youngest(sources: list[tuple[str, SourceFile]]) -> int:
    """When the file that was written last was, in nanoseconds."""
    return max((source.modified for _, source in sources), default=0)


def tokenizer_plan(config: CorpusConfig) -> str:
    """Where the tokenizer comes from, for people."""
    settings = config.tokenizer
    if not needs_training(settings):
        return str(settings.path or "bytes")
    megabytes = settings.training_bytes / 1e6
    return f"training {settings.kind} with {settings.vocab_size:,} pieces on at most {megabytes:g} MB of the text"


def recipe_of(config: CorpusConfig, sources: list[tuple[str, SourceFile]]) -> dict[str, Any]:
    """All that the corpus' bytes depend on, without the places where things lie."""
    settings = {name: value for name, value in to_tree(config).items() if name not in NOT_IN_RECIPE}
    if config.tokenizer.path:
        settings["tokenizer"] = Tokenizer.load(config.tokenizer.path).fingerprint
    listing = json.dumps(
        [[split, source.name, source.kind, source.size] for split, source in sources]
    )
    return {
        "settings": settings,
        "files": len(sources),
        "files_hash": hashlib.sha256(listing.encode()).hexdigest(),
    }


def result_of(output: Path, was_finished: bool = False) -> BuildResult:
    """What a finished build has left in `output`."""
    manifests = {
        split: read_manifest(output / split)
        for split in SPLITS
        if (output / split / MANIFEST_NAME).exists()
    }
    rejects = output / REJECTS_NAME
    num_rejects = len(rejects.read_bytes().splitlines()) if rejects.exists() else 0
    return BuildResult(manifests, num_rejects, was_finished, **read_counts(output))


def splits_of_build(config: CorpusConfig) -> tuple[str, ...]:
    """The splits that a build with these settings writes."""
    return (
        ("train", "validation")
        if config.validation_input or config.validation_fraction
        else ("train",)
    )


def _write_splits(
    config: CorpusConfig,
    sources: list[tuple[str, SourceFile]],
    tokenizer: Tokenizer,
    rules: DocumentRules,
    journal: BuildJournal,
    report: Report,
    may_be_empty: bool,
) -> None:
    splits = splits_of_build(config)
    writers = {split: SplitWriter(split, config, tokenizer, journal) for split in splits}
    progress = Progress(report, sum(source.size for _, source in sources))
    rejects_path = journal.directory / REJECTS_NAME
    with named_errors(rejects_path), open(rejects_path, "wb") as rejects_file:
        rejects = RejectList(rejects_file, config.max_rejects, rejects_path)
        jobs = _jobs(config, sources, rejects, rules, progress)
        new_jobs = (job for job in jobs if not writers[job.split].has_already())
        for job, ids in _encoded(new_jobs, tokenizer, config.threads or os.cpu_count() or 1):
            writers[job.split].add(job.document, ids)
            progress.add(len(job.document.text), len(ids) + 1)
    progress.show()
    for writer in writers.values():
        writer.flush()
    if not may_be_empty:
        documents = {
            split: sum(s.info.documents for s in writer.shards) for split, writer in writers.items()
        }
        refuse_empty(config, documents, config.output, rejects.example)
    if rejects.count:
        fsync_file(rejects_path)
        rejects_path.replace(config.output / REJECTS_NAME)
    for split in reversed(splits):  # train last: who finds its manifest finds everything
        writers[split].finish()


def _jobs(
    config: CorpusConfig,
    sources: list[tuple[str, SourceFile]],
    rejects: RejectList,
    rules: DocumentRules,
    progress: Progress,
) -> Iterator[_Job]:
    """Every usable document with the split it belongs to, in the order of the input."""
    for split, source in sources:
        for document in read_documents(source, config, progress.follow):
            if isinstance(document, Reject):
                rejects.add(document)
                continue
            # Decided by the whole document's name, so that its parts stay together.
            target = split or ("validation" if is_validation(document.id, config) else "train")
            yield from (_Job(target, part) for part in rules.apply(document))
        progress.finish_file(source.size)


def _encoded(
    jobs: Iterable[_Job], tokenizer: Tokenizer, threads: int
) -> Iterator[tuple[_Job, np.ndarray]]:
    """Each job with its ids; while one batch is encoded, the next is read and the one before is written."""
    with ThreadPoolExecutor(1) as pool:
        before: list[_Job] = []
        pending = None
        for batch in _batches(jobs):
            future = pool.submit(
                tokenizer.encode_many, [job.document.text for job in batch], threads
            )
            if pending is not None:
                yield from zip(before, pending.result(), strict=True)
            before, pending = batch, future
        if pending is not None:
            yield from zip(before, pending.result(), strict=True)


def _batches(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    batch: list[_Job] = []
    characters = 0
    for job in jobs:
        batch.append(job)
        characters += len(job.document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def refuse_empty(
    config: CorpusConfig, documents: dict[str, int], begun: Path, hint: str = ""
) -> None:
    """DataError if a split that has to be has no documents; `begun` is what other settings could not go on with."""
    if not documents["train"]:
        raise DataError(
            f"no documents for the training split in {', '.join(map(str, config.input))}{hint}"
        )
    if not documents.get("validation", 1):
        raise DataError(
            f"no documents for the validation split: validation_fraction={config.validation_fraction} of "
            f"{documents['train']} documents; raise it, set it to 0 for none, or give validation_input, and remove "
            f"{begun}, which was built without"
        )
