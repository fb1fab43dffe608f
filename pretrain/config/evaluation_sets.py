"""The corpora that a run is evaluated on besides its validation split. Torch-free.

A set is a validation split: of a corpus named in `evaluation.sets`, or of a part of a mixture.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS, read_manifest
from data_pipeline.errors import DataError
from data_pipeline.files import path_text, url_of
from data_pipeline.setting_fields import LONGEST_NAME
from pretrain.config.run import RunConfig

VALIDATION = SPLITS[1]


@dataclass(frozen=True)
class EvaluationSet:
    """A name and where its text is."""

    name: str
    path: Path  # of the corpus, or of one split of it
    manifest_hash: str = ""  # that the corpus must have
    is_part: bool = False  # of a mixture: it may have no validation split, and is left out then

    def directory(self, cache: CacheConfig) -> Path:
        """Return where its split is, or would be; DataError unless its corpus has the hash.

        Fetches the manifests and the tokenizer of a URL.
        """
        from data_pipeline.corpora.corpus_hash import pinned_directory  # late: the object stores

        split = split_of(self.path)
        return pinned_directory(split.parent, cache, self.manifest_hash) / split.name


def split_of(path: Path) -> Path:
    """Return the split that a path stands for: itself, or the validation split of a corpus."""
    is_split = url_of(path) is None and (path / MANIFEST_NAME).is_file()
    return path if is_split else path / VALIDATION


def evaluation_sets(run: RunConfig) -> list[EvaluationSet]:
    """Return the sets of a run with all its phases; a named one replaces a part of its name."""
    wanted = run.evaluation
    parts = list({part.path: part for part in run.data.all_parts}.values())
    names = _names_of([part.path for part in parts]) if wanted.mixture_parts else []
    sets = {
        name: EvaluationSet(name, part.path, part.manifest_hash, is_part=True)
        for name, part in zip(names, parts, strict=False)
    }
    for name, path in wanted.sets.items():
        sets[name] = EvaluationSet(name, path, wanted.set_hashes.get(name, ""))
    return list(sets.values())


def splits_of_sets(run: RunConfig, corpus: Path | None = None) -> dict[str, Path]:
    """Return name -> directory of each set's split; parts without one are left out.

    DataError for a set without one, or with another tokenizer than `corpus`, by default that of the
    run: a loss per token says nothing then.
    """
    cache = run.data.cache
    sets = [(each, each.directory(cache)) for each in evaluation_sets(run)]
    if not sets:
        return {}
    expected = read_manifest((corpus or run.data.directory()) / VALIDATION).tokenizer
    found = {}
    for each, directory in sets:
        if each.is_part and not (directory / MANIFEST_NAME).is_file():
            continue
        try:
            tokenizer = read_manifest(directory).tokenizer
        except DataError as error:
            raise DataError(f"evaluation.sets.{each.name}: {error}") from None
        if tokenizer != expected:
            raise DataError(
                f"evaluation.sets.{each.name}: {path_text(each.path)} was made with the tokenizer "
                f"{tokenizer[:16]}, data.path with {expected[:16]}; build the set with the "
                "tokenizer of data.path (tokenizer.path)"
            )
        found[each.name] = directory
    return found


def hashes_of_sets(splits: Mapping[str, Path]) -> dict[str, str]:
    """Return name -> hash of the split of each set."""
    return {name: read_manifest(split).hash for name, split in splits.items()}


def check_same_sets(hashes_of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise DataError unless all ranks have found the same sets: they evaluate together."""
    expected = hashes_of_ranks[0]
    for rank, found in enumerate(hashes_of_ranks):
        names = sorted({*found, *expected})
        if differing := [name for name in names if found.get(name) != expected.get(name)]:
            raise DataError(
                f"rank {rank} finds another validation split of {', '.join(differing)} than rank "
                "0, or none; every node needs the same corpora under the same paths"
            )


def _names_of(paths: Iterable[Path]) -> list[str]:
    """Return a name for each path: its last part, or its last two, or with a number."""
    parts = [[_as_name(part) for part in Path(path).parts] or ["part"] for path in paths]
    last = Counter(part[-1] for part in parts)
    names = [part[-1] if last[part[-1]] == 1 else "-".join(part[-2:]) for part in parts]
    known = Counter(names)
    return [
        name if known[name] == 1 else f"{name}-{number}"
        for number, name in enumerate((name[-LONGEST_NAME + 10 :] for name in names), start=1)
    ]


def _as_name(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]", "-", part).strip("-.") or "part"
