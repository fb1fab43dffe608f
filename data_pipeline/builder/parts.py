"""One corpus built in n parts, by processes here or by the tasks of an array job, and merged.

A part is a contiguous stretch of the input files in their order, of about 1/n of the bytes, and a build of its own in
OUTPUT.parts: each goes on after a kill by itself. The merge moves the shards behind each other. The documents and
their order do not depend on n; the borders of shards do, because each part ends one.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_pipeline.builder.build_corpus import (
    BuildResult,
    build_sources,
    list_all_sources,
    recipe_of,
    refuse_empty,
    result_of,
    splits_of_build,
)
from data_pipeline.builder.duplicates import write_hashes
from data_pipeline.builder.journal import (
    BuildJournal,
    check_is_free,
    check_recipe,
    claimed_output,
    has_begun,
    is_finished,
)
from data_pipeline.builder.reject_list import REJECTS_NAME
from data_pipeline.builder.sources import PARTS_SUFFIX, SourceFile
from data_pipeline.builder.train_tokenizer import needs_training
from data_pipeline.config import CorpusConfig
from data_pipeline.corpora.manifest import (
    TOKENIZER_DIRECTORY,
    ShardInfo,
    check_shard,
    read_manifest,
)
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.files import fsync_directory, write_text
from data_pipeline.progress import Report
from data_pipeline.shards.shards import read_index, renamed, shard_name, write_index
from data_pipeline.tokenizer import Tokenizer

PART_NAMES = f"{5 * '[0-9]'}-of-{5 * '[0-9]'}"  # of their directories


def parts_directory(config: CorpusConfig) -> Path:
    """Where the parts lie until they are merged: beside the output, so that shards can be moved."""
    output = config.output.resolve()
    return output.with_name(f"{output.name}{PARTS_SUFFIX}")


def shared_directory(config: CorpusConfig, num_parts: int) -> Path:
    """Where things lie that all parts use, if one command builds all of them."""
    return _directory(config, 0, num_parts)


def build_part(
    config: CorpusConfig,
    part: int,
    num_parts: int,
    report: Report = lambda what: None,
    seen: Iterable[bytes] | None = None,
) -> BuildResult:
    """Build part `part` of 1 to `num_parts`, or go on with it; any parts may be built at the same time.

    `seen` are the hashes of the texts that parts before it have; without them no duplicates can be dropped.
    """
    if not 1 <= part <= num_parts:
        raise ConfigError(f"found part {part} of {num_parts}, expected 1 to {num_parts}")
    if needs_training(config.tokenizer):
        raise ConfigError(
            "parts need one tokenizer that is there before them; set tokenizer.path to one, "
            "such as that of a corpus built from a sample of the text"
        )
    if config.drop_duplicates and seen is None:
        raise ConfigError(
            "drop_duplicates compares all documents, which a task alone cannot; use --processes with it"
        )
    sources = list_all_sources(config)
    if is_finished(
        config.output
    ):  # as a task of an array job finds it that is begun again after the merge
        check_recipe(config.output, _merged_recipe(config, sources, num_parts))
        return result_of(config.output, was_finished=True)
    check_output(config, sources, num_parts)
    parts_directory(config).mkdir(parents=True, exist_ok=True)
    part_config = replace(config, output=_directory(config, part, num_parts))
    return build_sources(
        part_config, _shares(sources, num_parts)[part - 1], report, is_part=True, seen=seen or ()
    )


def check_output(
    config: CorpusConfig, sources: list[tuple[str, SourceFile]], num_parts: int
) -> None:
    """ConfigError, before hours of work, if the parts could not be merged into the output."""
    check_is_free(config.output)
    if has_begun(config.output):
        BuildJournal(config.output, _merged_recipe(config, sources, num_parts), modified=0)


def list_hashes(
    config: CorpusConfig, part: int, num_parts: int, report: Report = lambda what: None
) -> None:
    """Have the hashes of the part's texts at `hashes_path`."""
    path = hashes_path(config, part, num_parts)
    if not path.exists():
        write_hashes(
            path,
            [source for _, source in _shares(list_all_sources(config), num_parts)[part - 1]],
            config,
        )


def hashes_path(config: CorpusConfig, part: int, num_parts: int) -> Path:
    """Where the hashes of a part's texts are listed."""
    return shared_directory(config, num_parts) / f"{part:05d}.hashes"


def merge_parts(config: CorpusConfig, num_parts: int) -> BuildResult:
    """One corpus out of finished parts, which are gone afterwards; the same call goes on after a kill.

    DataError when a part is not finished, or the text holds nothing for a split.
    """
    sources = list_all_sources(config)
    recipe = _merged_recipe(config, sources, num_parts)
    if is_finished(config.output):
        check_recipe(config.output, recipe)
        _remove_parts(config)
        return result_of(config.output, was_finished=True)
    results = _finished_parts(config, sources, num_parts)
    documents = {
        split: sum(r.manifests[split].documents for r in results)
        for split in splits_of_build(config)
    }
    refuse_empty(config, documents, parts_directory(config))
    directories = [_directory(config, part, num_parts) for part in range(1, num_parts + 1)]
    with claimed_output(config.output) as output:
        journal = BuildJournal(output, recipe, modified=0)
        tokenizer = Tokenizer.load(directories[0] / TOKENIZER_DIRECTORY)
        tokenizer.save(output / TOKENIZER_DIRECTORY)
        _merge_rejects(config, directories)
        for split in reversed(
            splits_of_build(config)
        ):  # train last: who finds its manifest finds everything
            _merge_split(config, [directory / split for directory in directories], output / split)
        journal.finish(
            {
                name: sum(getattr(result, name) for result in results)
                for name in ("duplicates", "split_documents")
            }
        )
    _remove_parts(config)
    return result_of(config.output)


def _merged_recipe(
    config: CorpusConfig, sources: list[tuple[str, SourceFile]], num_parts: int
) -> dict[str, Any]:
    return {**recipe_of(config, sources), "parts": num_parts}


def _shares(
    sources: list[tuple[str, SourceFile]], num_parts: int
) -> list[list[tuple[str, SourceFile]]]:
    """The files of each part: those whose first byte lies in the part's share of all bytes."""
    total, place = sum(source.size for _, source in sources), 0
    shares: list[list[tuple[str, SourceFile]]] = [[] for _ in range(num_parts)]
    for split, source in sources:
        share = place * num_parts // max(total, 1)
        shares[min(share, num_parts - 1)].append(
            (split, source)
        )  # empty files at the end belong to the last part
        place += source.size
    return shares


def _directory(config: CorpusConfig, part: int, num_parts: int) -> Path:
    return parts_directory(config) / f"{part:05d}-of-{num_parts:05d}"


def _finished_parts(
    config: CorpusConfig, sources: list[tuple[str, SourceFile]], num_parts: int
) -> list[BuildResult]:
    trained = shared_directory(config, num_parts) / TOKENIZER_DIRECTORY
    if needs_training(config.tokenizer) and trained.exists():
        config = replace(config, tokenizer=replace(config.tokenizer, path=trained))
    results = []
    for part, share in enumerate(_shares(sources, num_parts), 1):
        directory = _directory(config, part, num_parts)
        if not is_finished(directory):
            raise DataError(
                f"part {part} of {num_parts} is not finished; run `build --part {part}/{num_parts}` first"
            )
        check_recipe(directory, recipe_of(config, share))
        results.append(result_of(directory))
    return results


def _merge_split(config: CorpusConfig, parts: list[Path], target: Path) -> None:
    """Move the shards of all parts behind each other; index and manifest follow when all are there."""
    target.mkdir(exist_ok=True)
    manifests = [read_manifest(part) for part in parts]
    shards: list[ShardInfo] = []
    entries = []
    for part, manifest in zip(parts, manifests, strict=True):
        for shard, entry in zip(
            manifest.shards, read_index(part, len(manifest.shards)), strict=True
        ):
            name = shard_name(len(shards), config.shard_format)
            if (part / shard.path).exists():  # else a killed merge has moved it already
                (part / shard.path).replace(target / name)
            check_shard(target / name, shard, with_hash=False)
            shards.append(replace(shard, path=name))
            entries.append(renamed(entry, name))
    fsync_directory(target)
    write_index(target, entries)
    replace(manifests[0], shards=tuple(shards)).write(target)


def _merge_rejects(config: CorpusConfig, parts: list[Path]) -> None:
    lists = [(part / REJECTS_NAME).read_text() for part in parts if (part / REJECTS_NAME).exists()]
    count = sum(len(text.splitlines()) for text in lists)
    if count > config.max_rejects:
        raise DataError(
            f"the parts have {count} unusable records, more than max_rejects={config.max_rejects}; they are listed in "
            f"{parts_directory(config)}/*/{REJECTS_NAME}: put them right or raise max_rejects"
        )
    if lists:
        write_text(config.output / REJECTS_NAME, "".join(lists))


def _remove_parts(config: CorpusConfig) -> None:
    """Nothing else that may lie there is touched."""
    directory = parts_directory(config)
    for path in directory.glob(PART_NAMES):
        shutil.rmtree(path)
    with contextlib.suppress(OSError):  # absent, or holds things of others
        directory.rmdir()
