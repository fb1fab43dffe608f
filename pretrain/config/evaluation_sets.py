"""The validation splits that a run is evaluated on besides its own corpus'.

A set is the split of a corpus named in `evaluation.sets`, or of a part of a mixture. Torch-free.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS, read_manifest
from foundation.errors import DataError, named_setting
from foundation.paths import path_text, url_of
from foundation.settings import LONGEST_NAME
from pretrain.config.run import RunConfig

VALIDATION = SPLITS[1]


@dataclass(frozen=True)
class EvaluationSet:
    """A validation split, or the corpus that has it, and the name of its losses."""

    name: str
    path: Path  # of the corpus, or of one split of it
    manifest_hashes: tuple[str, ...] = ()  # the corpus must have one of them, if there are any
    is_part: bool = False  # a part of a mixture, which is skipped if it has no validation split


def evaluated_split(path: Path) -> Path:
    """Return the split that a path stands for: itself, or the validation split of a corpus."""
    is_split = url_of(path) is None and (path / MANIFEST_NAME).is_file()
    return path if is_split else path / VALIDATION


def evaluation_sets(run: RunConfig) -> list[EvaluationSet]:
    """Return the sets of all a run's phases; `evaluation.sets` replace parts of the same name."""
    parts = list({part.path: part for part in run.data.all_parts}.values())
    names = _set_names([part.path for part in parts])
    sets = {
        name: EvaluationSet(name, part.path, run.data.manifest_hashes, is_part=True)
        for name, part in zip(names, parts, strict=True)
    }
    sets |= {name: EvaluationSet(name, path) for name, path in run.evaluation.sets.items()}
    return list(sets.values())


def splits_of_sets(run: RunConfig) -> dict[str, Path]:
    """Return name -> directory of each set's split; parts without one are skipped.

    DataError for a named set without a split, for a wrong hash, and for another tokenizer than the
    run's corpus has: losses per token could not be compared. Fetches manifests and tokenizers of
    URLs.
    """
    from data_pipeline.corpora.corpus_identity import pinned_directory

    splits: dict[str, Path] = {}
    if not (sets := evaluation_sets(run)):
        return splits
    expected = read_manifest(run.data.directory() / VALIDATION).tokenizer
    for part in sets:
        split = evaluated_split(part.path)
        with named_setting(f"evaluation.sets.{part.name}"):
            corpus = pinned_directory(split.parent, run.data.cache, part.manifest_hashes)
            directory = corpus / split.name
            if part.is_part and not (directory / MANIFEST_NAME).is_file():
                continue
            tokenizer = read_manifest(directory).tokenizer
        if tokenizer != expected:
            raise DataError(
                f"evaluation.sets.{part.name}: {path_text(part.path)} was made with the tokenizer "
                f"{tokenizer[:16]}, data.path with {expected[:16]}; build the set with the "
                "tokenizer of data.path (tokenizer.path)"
            )
        splits[part.name] = directory
    return splits


def hashes_of_sets(splits: Mapping[str, Path]) -> dict[str, str]:
    """Return name -> hash of the split of each set."""
    return {name: read_manifest(split).hash for name, split in splits.items()}


def check_same_sets(hashes_of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise DataError unless all ranks have found the same sets: they evaluate together."""
    expected = hashes_of_ranks[0]
    for rank, hashes in enumerate(hashes_of_ranks):
        names = sorted({*hashes, *expected})
        if differing := [name for name in names if hashes.get(name) != expected.get(name)]:
            raise DataError(
                f"rank {rank} finds another validation split of {', '.join(differing)} than rank "
                "0, or none; every node needs the same corpora under the same paths"
            )


def _set_names(paths: Iterable[Path]) -> list[str]:
    """Return a name for each path: its last part, or its last two, or with a number."""
    parts = [re.sub(r"[^A-Za-z0-9._+/-]", "-", str(path)).split("/") for path in paths]
    parts = [[part.strip("-.") or "part" for part in split_path] for split_path in parts]
    last = Counter(part[-1] for part in parts)
    names = [part[-1] if last[part[-1]] == 1 else "-".join(part[-2:]) for part in parts]
    known = Counter(names)
    return [
        name if known[name] == 1 else f"{name}-{number}"
        for number, name in enumerate((name[-LONGEST_NAME + 10 :] for name in names), start=1)
    ]
