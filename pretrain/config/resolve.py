"""A run's settings, completed by what its corpus determines. Torch-free.

The corpora that a run is evaluated on besides its validation split.

A set is a validation split: of a corpus named in `evaluation.sets`, or of a part of a mixture.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.config import MixturePart
from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS, read_manifest, read_vocab_size
from foundation.errors import ConfigError, DataError, named_setting
from foundation.files import YAML_SUFFIXES, absolute, path_text, url_of
from foundation.settings import LONGEST_NAME
from pretrain.config.model import Precision
from pretrain.config.run import RunConfig, mixture_setting, run_at, runs_of_phases

VALIDATION = SPLITS[1]


@dataclass(frozen=True)
class EvaluationSet:
    """A name and where its text is."""

    name: str
    path: Path  # of the corpus, or of one split of it
    manifest_hashes: tuple[str, ...] = ()  # of which the corpus must have one, if there are any
    is_part: bool = False  # of a mixture: it may have no validation split, and is left out then


def split_of(path: Path) -> Path:
    """Return the split that a path stands for: itself, or the validation split of a corpus."""
    is_split = url_of(path) is None and (path / MANIFEST_NAME).is_file()
    return path if is_split else path / VALIDATION


def evaluation_sets(run: RunConfig) -> list[EvaluationSet]:
    """Return the sets of a run with all its phases; a named one replaces a part of its name."""
    parts = list({part.path: part for part in run.data.all_parts}.values())
    names = _names_of([part.path for part in parts])
    sets = {
        name: EvaluationSet(name, part.path, run.data.manifest_hashes, is_part=True)
        for name, part in zip(names, parts, strict=True)
    }
    sets |= {name: EvaluationSet(name, path) for name, path in run.evaluation.sets.items()}
    return list(sets.values())


def splits_of_sets(run: RunConfig) -> dict[str, Path]:
    """Return name -> directory of each set's split; parts without one are left out.

    DataError for a set without one, with other hashes than it must have, or with another tokenizer
    than the run's corpus: a loss per token says nothing then. Fetches manifests and tokenizers of
    URLs.
    """
    from data_pipeline.corpora.corpus import pinned_directory  # late: the object stores

    found: dict[str, Path] = {}
    if not (sets := evaluation_sets(run)):
        return found
    expected = read_manifest(run.data.directory() / VALIDATION).tokenizer
    for each in sets:
        split = split_of(each.path)
        with named_setting(f"evaluation.sets.{each.name}"):
            corpus = pinned_directory(split.parent, run.data.cache, each.manifest_hashes)
            directory = corpus / split.name
            if each.is_part and not (directory / MANIFEST_NAME).is_file():
                continue
            tokenizer = read_manifest(directory).tokenizer
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
    parts = [re.sub(r"[^A-Za-z0-9._+/-]", "-", str(path)).split("/") for path in paths]
    parts = [[part.strip("-.") or "part" for part in each] for each in parts]
    last = Counter(part[-1] for part in parts)
    names = [part[-1] if last[part[-1]] == 1 else "-".join(part[-2:]) for part in parts]
    known = Counter(names)
    return [
        name if known[name] == 1 else f"{name}-{number}"
        for number, name in enumerate((name[-LONGEST_NAME + 10 :] for name in names), start=1)
    ]


def resolve(config: RunConfig) -> RunConfig:
    """Return the run with its vocabulary size; UserError if it cannot train on the corpus.

    Reads no shard: every rank does this for all lanes, and reads its own later.
    """
    # Imported late: commands that only estimate costs need no numpy.
    from data_pipeline.corpora.corpus import tokenizer_of
    from data_pipeline.lanes.lane_plan import check_lanes
    from data_pipeline.lanes.mixture import open_training_data, plan_of

    corpus = None
    for step in (0, *(phase.from_step for phase in config.data.phases)):
        phase, setting = run_at(config, step), mixture_setting(config, step)
        data = phase.data
        corpus = open_training_data(
            data.path, data.mixture, data.cache, data.manifest_hashes, setting
        )
        check_lanes(plan_of(corpus, data.lanes, phase.seed), corpus.manifest.longest_whole)
    assert corpus is not None
    with named_setting("data.path"):
        read_manifest(config.data.directory() / VALIDATION)
    splits_of_sets(config)
    # The same in all corpora. Settings that say another one are of a model without this corpus.
    size = tokenizer_of(corpus.tokenizer_directory.parent).vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))


def resolve_if_built(config: RunConfig) -> RunConfig:
    """Return what `resolve` does, if the corpus is there or a mixture is named.

    Otherwise what `with_vocabulary` does: costs can be estimated before a corpus is built.
    """
    path = config.data.path
    is_there = url_of(path) is not None or (path / "train" / MANIFEST_NAME).is_file()
    if is_there or any(phase.data.mixture for phase in runs_of_phases(config)):
        return resolve(config)
    return with_vocabulary(config)


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Return the run with its vocabulary size: that of its corpus, or without one of its settings.

    Raises ConfigError if neither has it. Unlike `resolve` it reads one file and checks nothing.
    """
    if config.model.vocab_size and not (config.data.path / "train" / MANIFEST_NAME).is_file():
        return config
    manifest = config.data.directory() / "train" / MANIFEST_NAME
    if not manifest.is_file():
        raise ConfigError(
            "model.vocab_size is not set and there is no corpus at "
            f"{path_text(absolute(config.data.path))} to read it from; set it, or build the corpus"
        )
    return replace(config, model=replace(config.model, vocab_size=read_vocab_size(manifest)))


def with_precision(config: RunConfig, best: Precision) -> RunConfig:
    """Return the run with the precision that `auto` stands for where `best` is the best one."""
    precision = best if config.engine.precision == "auto" else config.engine.precision
    return replace(config, engine=replace(config.engine, precision=precision))


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the run with absolute paths: it can then be used from any directory."""
    data = config.data
    data = replace(
        data,
        path=absolute(Path(data.path)),
        mixture=_with_absolute_paths(data.mixture),
        phases=tuple(
            replace(phase, mixture=_with_absolute_paths(phase.mixture)) for phase in data.phases
        ),
    )
    sets = {name: Path(absolute(path)) for name, path in config.evaluation.sets.items()}
    tasks = tuple(
        str(absolute(Path(task))) if task.endswith(YAML_SUFFIXES) else task
        for task in config.evaluation.tasks
    )
    weights = config.initial_weights
    return replace(
        config,
        data=data,
        evaluation=replace(config.evaluation, sets=sets, tasks=tasks),
        initial_weights=Path(absolute(weights)) if weights else None,
    )


def _with_absolute_paths(mixture: tuple[MixturePart, ...]) -> tuple[MixturePart, ...]:
    return tuple(replace(part, path=absolute(Path(part.path))) for part in mixture)
