"""The second half of a build that shuffles: the runs of all parts become the shards of a corpus.

Keys are divided into ranges, called buckets, of about `shuffle_bytes` each. A bucket is read into
host memory from all runs, sorted by its keys and written as shards; its end also ends a shard. So
the shards depend on the documents and the settings alone. The n parts of a build write n stretches
of the buckets, each a directory of its own, which `merge_parts` joins. The validation split keeps
the order of the input; the first part writes all of it, so that its shards do not depend on n.

A part that is killed resumes after its last finished shard, as any build does.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.builder.journal import BuildJournal, claimed_output, is_built
from data_pipeline.builder.sorted_runs import DOCUMENT_BYTES, NUM_KEYS, Run
from data_pipeline.builder.split_writer import CorpusShards, EncodedDocument, Progress, SplitWriter
from data_pipeline.config import CorpusConfig
from data_pipeline.corpora.manifest import SPLITS, TOKENIZER_DIRECTORY, Manifest, read_manifest
from data_pipeline.tokenizer import Tokenizer
from foundation.progress import Report

SHUFFLED = "shuffled"  # directory in the directory of a part
TRAIN, VALIDATION = SPLITS
SETTINGS = ("shard_format", "shard_bytes", "shuffle_bytes")  # shards depend on them, runs do not


def shuffle_part(
    config: CorpusConfig, parts: Sequence[Path], number: int, report: Report = lambda what: None
) -> None:
    """Write stretch `number`, from 1 on, of the shuffled documents of all `parts`, or resume it."""
    with claimed_output(parts[number - 1] / SHUFFLED) as output:
        if is_built(output):  # before it reads all manifests: a merge calls this for each part
            return
        manifests = [read_manifest(part / TRAIN) for part in parts]
        buckets = _num_buckets(manifests, config.shuffle_bytes)
        first, end = (part * buckets // len(parts) for part in (number - 1, number))
        progress = Progress(report, end - first)
        settings = {name: getattr(config, name) for name in SETTINGS}
        work = {"runs": [manifest.hash for manifest in manifests], "buckets": [first, end]}
        journal = BuildJournal(output, {"settings": settings, **work}, modified=0)
        tokenizer = Tokenizer.load(parts[0] / TOKENIZER_DIRECTORY)
        if number == 1 and (parts[0] / VALIDATION).exists():
            writer = SplitWriter(VALIDATION, CorpusShards(config), tokenizer, journal)
            for run in _runs_of(parts, VALIDATION):
                _write_range([run], 0, NUM_KEYS, writer, progress)
            writer.flush()
            writer.finish()
        writer = SplitWriter(TRAIN, CorpusShards(config), tokenizer, journal)
        runs = _runs_of(parts, TRAIN)
        for bucket in range(first, end):
            keys = _first_key(bucket, buckets), _first_key(bucket + 1, buckets)
            _write_range(runs, *keys, writer, progress)
            writer.flush()
            progress.finish_file(1)
        progress.show()
        writer.finish()
        journal.finish()


def directories_of(parts: Sequence[Path], split: str) -> list[Path]:
    """Return where `shuffle_part` has written a split, in order."""
    return [part / SHUFFLED / split for part in (parts if split == TRAIN else parts[:1])]


def _runs_of(parts: Sequence[Path], split: str) -> list[Run]:
    return [
        Run(part / split, info) for part in parts for info in read_manifest(part / split).shards
    ]


def _num_buckets(manifests: Sequence[Manifest], bucket_bytes: int) -> int:
    """Return the number of buckets, which does not depend on the number of parts or runs."""
    token_bytes = np.dtype(manifests[0].dtype).itemsize
    size = sum(split.tokens * token_bytes + split.documents * DOCUMENT_BYTES for split in manifests)
    return max(1, -(-size // bucket_bytes))


def _first_key(bucket: int, buckets: int) -> int:
    return -(-bucket * NUM_KEYS // buckets)


def _write_range(
    runs: Sequence[Run], first: int, end: int, writer: SplitWriter, progress: Progress
) -> None:
    """Write the documents with keys from `first` to before `end`, unless a shard has them."""
    if writer.skip_all(sum(run.count(first, end) for run in runs)):
        return
    for document in _sorted(runs, first, end):
        if not writer.skip():
            writer.add(document)
            progress.add(document.characters, len(document.tokens))


def _sorted(runs: Sequence[Run], first: int, end: int) -> Iterator[EncodedDocument]:
    """Yield the documents with keys from `first` to before `end`, in the order of the keys."""
    slices = [run.between(first, end) for run in runs]
    run_of = np.repeat(np.arange(len(slices)), [len(keys) for keys, _ in slices])
    index_in = np.concatenate([np.arange(len(keys)) for keys, _ in slices])
    # Stable: of equal keys, the earlier run comes first.
    order = np.argsort(np.concatenate([keys for keys, _ in slices]), kind="stable")
    for run, index in zip(run_of[order].tolist(), index_in[order].tolist(), strict=True):
        yield slices[run][1][index]
