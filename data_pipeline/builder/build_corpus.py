"""Build a corpus: documents to tokens to shards.

How one document travels: `list_all_sources` finds its file; `read_documents` turns a record into a
Document; `parts_of` may cut it; `_encoded` makes token ids of its text; `SplitWriter`
appends an end-of-document token and writes it into a shard.

Output: tokenizer/, train/ and validation/ (each shards, index.json for stock readers, manifest.json
last), build.json, and rejects.jsonl if any record was unusable. The build is deterministic and can
be killed at any moment: the same call resumes it and gives the same bytes (see journal.py).
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.builder.build_tokenizer import describe_tokenizer, prepare_tokenizer
from data_pipeline.builder.documents import read_documents, refuse_packed, stretches_of
from data_pipeline.builder.given_tokenizer import given_tokenizer
from data_pipeline.builder.journal import BuildJournal, check_recipe, claimed_output, is_built
from data_pipeline.builder.records import REJECTS_NAME, Document, Reject, RejectList, parts_of
from data_pipeline.builder.round_trip import RoundTripCheck
from data_pipeline.builder.sorted_runs import SortedRuns
from data_pipeline.builder.sources import SourceFile, check_apart, check_unchanged, list_sources
from data_pipeline.builder.split_writer import (
    CorpusShards,
    Progress,
    ShardFiles,
    Sources,
    SplitWriter,
    check_sources,
    encoded_document,
    is_validation,
    splits_of_build,
)
from data_pipeline.config import CorpusConfig
from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    Manifest,
    read_manifest,
)
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.vocabularies.vocabulary import UnencodableText
from foundation.files import fsync_file, lines_of, move, named_errors
from foundation.progress import Note, Report
from foundation.typed_values import json_text, to_tree

# Characters, or tokens, that are encoded together: enough for all threads, few in host memory.
BATCH_CHARACTERS = 1 << 22
# Settings that do not change the corpus.
NOT_IN_RECIPE = ("input", "validation_input", "output", "threads", "max_rejects")


@dataclass(frozen=True)
class BuildResult:
    """What is on disk after a build."""

    manifests: dict[str, Manifest]  # by split
    rejects: int  # unusable records
    was_finished: bool = False  # before this call


@dataclass(frozen=True, slots=True)
class _Job:
    """A document to be encoded, and the split that it belongs to."""

    split: str
    document: Document


def build_corpus(config: CorpusConfig, report: Report = lambda what: None) -> BuildResult:
    """Build the corpus that `config` describes, or resume a killed build of it.

    `report` gets lines of progress. Raises ConfigError or DataError for mistakes of the user, and
    OSError if the disk is full. In all these cases no manifest has been written, and the same call
    resumes with the finished shards.
    """
    return build_sources(config, list_all_sources(config, report), report)


def list_all_sources(config: CorpusConfig, report: Report = lambda what: None) -> Sources:
    """Return every input file in its order, with its split, or "" if each document decides."""
    training = list_sources(config.input, config, report)
    sources = [("", source) for source in training]
    if config.is_stream:
        sources = [stretch for source in training for stretch in stretches_of(source, config)]
    if config.validation_input:
        validation = list_sources(config.validation_input, config, report, is_validation=True)
        if config.is_stream:
            for source in validation:
                refuse_packed(source)
        check_apart((training, validation), "is training text and validation text")
        sources += [("validation", source) for source in validation]
    return sources


def training_sources(sources: Sources) -> list[SourceFile]:
    """Return the input files that the tokenizer is trained on."""
    return [source for split, source in sources if split != "validation"]


def build_sources(
    config: CorpusConfig,
    sources: Sources,
    report: Report = lambda what: None,
    is_part: bool = False,
) -> BuildResult:
    """Build a corpus of these files as `build_corpus` does, or a part, whose splits may be empty.

    With `shuffle_seed`, only parts can be built, and their splits are sorted runs (sorted_runs.py).
    """
    assert is_part or not config.shuffles
    recipe = recipe_of(config, sources)
    with claimed_output(config.output) as output:
        if is_built(output):
            check_recipe(output, recipe)
            return result_of(output, was_finished=True)
        if not is_part:
            config = check_sources(config, sources, report)
        journal = BuildJournal(output, recipe, last_modified(sources))
        report(f"tokenizer: {describe_tokenizer(config.tokenizer)}")
        directory = output / TOKENIZER_DIRECTORY
        tokenizer = prepare_tokenizer(directory, training_sources(sources), config)
        see = RoundTripCheck(tokenizer, report).see
        _write_splits(config, sources, tokenizer, see, journal, report)
        journal.finish()
        return result_of(output)


def last_modified(sources: Sources) -> int:
    """Return the time of the last change of any file, in nanoseconds."""
    return max((source.modified for _, source in sources), default=0)


def recipe_of(config: CorpusConfig, sources: Sources) -> dict[str, Any]:
    """Return all that the corpus' bytes depend on, without the locations of files."""
    settings = {name: value for name, value in to_tree(config).items() if name not in NOT_IN_RECIPE}
    if config.tokenizer.path:
        given = given_tokenizer(config.tokenizer.path, config.tokenizer)
        settings["tokenizer"] = {"given": given.fingerprint, "end_id": config.tokenizer.end_id}
    if not config.shuffles:
        del settings["shuffle_seed"], settings["shuffle_bytes"]
    files = [[split, source.name, source.kind, source.size] for split, source in sources]
    files_hash = hashlib.sha256(json_text(files).encode()).hexdigest()
    return {"settings": settings, "files": len(sources), "files_hash": files_hash}


def result_of(output: Path, was_finished: bool = False) -> BuildResult:
    """Return what a finished build has left in `output`."""
    manifests = {
        split: read_manifest(output / split)
        for split in SPLITS
        if (output / split / MANIFEST_NAME).exists()
    }
    rejects = output / REJECTS_NAME
    num_rejects = sum(1 for _ in lines_of(rejects))
    return BuildResult(manifests, num_rejects, was_finished)


def _write_splits(
    config: CorpusConfig,
    sources: Sources,
    tokenizer: Tokenizer,
    see: Callable[[Document], None],
    journal: BuildJournal,
    report: Report,
) -> None:
    splits = splits_of_build(config)
    kinds: dict[str, ShardFiles] = dict.fromkeys(splits, CorpusShards(config))
    if config.shuffles:
        kinds = {split: SortedRuns(config, keeps_order=split != "train") for split in splits}
    writers = {split: SplitWriter(split, kinds[split], tokenizer, journal) for split in splits}
    progress = Progress(report, sum(source.size for _, source in sources))
    rejects_path = journal.directory / REJECTS_NAME
    with named_errors(rejects_path), open(rejects_path, "wb") as rejects_file:
        rejects = RejectList(rejects_file, config.max_rejects, rejects_path)
        jobs = _jobs(config, sources, rejects, see, progress)
        for writer in writers.values():
            for reject in writer.rejects_before():
                rejects.add(reject)
        new_jobs = (job for job in jobs if not writers[job.split].skip())
        for job, ids in _encoded(new_jobs, tokenizer, config.threads or os.cpu_count() or 1):
            if isinstance(ids, Reject):
                rejects.add(ids)
                writers[job.split].reject(ids)
                continue
            writers[job.split].add(encoded_document(job.document, ids, tokenizer))
            progress.add(len(job.document.text), len(ids) + 1)
    progress.show()
    for writer in writers.values():
        writer.flush()
    if rejects.empty_rows:
        report(Note(f"{rejects.empty_rows:,} empty rows were left out"))
    if rejects.count:
        fsync_file(rejects_path)
        move(rejects_path, config.output / REJECTS_NAME)
    for split in reversed(splits):  # train last: its manifest shows that all is written
        writers[split].finish(config.is_stream)


def _jobs(
    config: CorpusConfig,
    sources: Sources,
    rejects: RejectList,
    see: Callable[[Document], None],
    progress: Progress,
) -> Iterator[_Job]:
    """Yield every usable document with its split, in the order of the input; call `see` with it."""
    for split, source in sources:
        for document in read_documents(source, config, progress.follow):
            if isinstance(document, Reject):
                rejects.add(document)
                continue
            # The uncut document's id decides, so that its parts are in the same split.
            target = split or ("validation" if is_validation(document.id, config) else "train")
            for part in parts_of(document, config.split_characters):
                see(part)
                yield _Job(target, part)
        check_unchanged(source)
        progress.finish_file(source.size)


def _encoded(
    jobs: Iterable[_Job], tokenizer: Tokenizer, threads: int
) -> Iterator[tuple[_Job, np.ndarray | Reject]]:
    """Yield each job with its token ids, or with a reject if its text cannot be encoded.

    A pipeline of three: while one batch is encoded (without the interpreter lock), this thread
    reads the next batch and its caller writes the previous one.
    """
    with ThreadPoolExecutor(1) as pool:
        before: list[_Job] = []
        pending = None
        for batch in _batches(jobs):
            future = pool.submit(_ids_of, batch, tokenizer, threads)
            if pending is not None:
                yield from zip(before, pending.result(), strict=True)
            before, pending = batch, future
        if pending is not None:
            yield from zip(before, pending.result(), strict=True)


def _ids_of(batch: list[_Job], tokenizer: Tokenizer, threads: int) -> list[np.ndarray | Reject]:
    """Return the ids of each document's text, or the checked tokens that it has instead."""
    documents = [job.document for job in batch]
    texts = [document for document in documents if document.tokens is None]
    encoded: Iterator[np.ndarray | Reject]
    try:
        encoded = iter(tokenizer.encode_many([document.text for document in texts], threads))
    except UnencodableText:
        encoded = (_ids_of_text(document, tokenizer) for document in texts)
    return [
        next(encoded)
        if document.tokens is None
        else tokenizer.checked(document.tokens, document.source)
        for document in documents
    ]


def _ids_of_text(document: Document, tokenizer: Tokenizer) -> np.ndarray | Reject:
    try:
        return tokenizer.encode(document.text)
    except UnencodableText as error:
        return Reject(document.source, str(error))


def _batches(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    batch: list[_Job] = []
    characters = 0
    for job in jobs:
        batch.append(job)
        characters += len(job.document.text)
        if job.document.tokens is not None:
            characters += len(job.document.tokens)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
