"""A run's settings, completed by what its corpus determines. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.config import MixturePart
from data_pipeline.corpora.manifest import MANIFEST_NAME, read_manifest, read_vocab_size
from data_pipeline.errors import ConfigError, DataError, UserError
from data_pipeline.files import absolute, path_text, url_of
from data_pipeline.yaml_files import YAML_SUFFIXES
from pretrain.config.choices import Precision, resolved_precision
from pretrain.config.evaluation_sets import splits_of_sets
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig

if TYPE_CHECKING:
    from data_pipeline.corpora.corpus import Corpus
    from data_pipeline.lanes.mixture import Mixture


def resolve(config: RunConfig) -> RunConfig:
    """Return the run with its vocabulary size.

    UserError with all reasons why the run cannot train on the corpus, also those that would only
    show later: a small corpus has several.
    """
    # Imported late: commands that only estimate costs need no numpy.
    from data_pipeline.corpora.corpus_tokenizer import tokenizer_of
    from data_pipeline.lanes.mixture import open_training_data

    phases = runs_of_phases(config)
    corpora = [
        open_training_data(data.path, data.mixture, data.cache, data.manifest_hash)
        for data in (phase.data for phase in phases)
    ]
    problems = [
        problem
        for phase, corpus in zip(phases, corpora, strict=True)
        for problem in _problems(phase, corpus)
    ]
    if problem := _error_of(lambda: read_manifest(config.data.directory() / "validation")):
        problems.append(problem)
    else:
        problems += filter(None, [_error_of(lambda: splits_of_sets(config))])
    if problems:
        count = f"{len(problems)} problems with the corpus: " if problems[1:] else ""
        raise DataError(count + "; also, ".join(problems))
    vocab_size = tokenizer_of(corpora[0].tokenizer_directory.parent).vocab_size  # same in all
    if config.model.vocab_size not in (0, vocab_size):
        raise UserError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer of "
            f"{path_text(config.data.path)} has {vocab_size} tokens; leave the setting out, it is "
            "taken from the corpus"
        )
    return _with_vocab_size(config, vocab_size)


def _problems(phase: RunConfig, corpus: Corpus | Mixture) -> list[str]:
    """Why the phase cannot read the corpus; what else would go wrong with it only if it cannot."""
    from data_pipeline.lanes.lane_plan import check_lanes
    from data_pipeline.lanes.mixture import plan_of

    lanes, segment, manifest = phase.data.lanes, phase.lane_tokens_per_step, corpus.manifest
    # Reads no shard: every rank does this for all lanes, and reads its own later.
    plan = plan_of(corpus, lanes, phase.seed)
    if not (problem := _error_of(lambda: check_lanes(plan, manifest.longest_document))):
        return []
    share = manifest.tokens // max(1, manifest.tokens // max(1, manifest.longest_document))
    if segment <= share:
        return [problem]
    number = phase.optim.gradient_segments
    what = f"{number} segments of a step, {segment}" if number > 1 else f"segments of {segment}"
    return [
        problem,
        f"{what} tokens are longer than the {share} tokens of a lane; use "
        f"data.segment_length={share // number} or less",
    ]


def _error_of(check: Callable[[], object]) -> str:
    """What a check finds wrong with the data; empty if nothing."""
    try:
        check()
    except DataError as error:
        return str(error)
    return ""


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
    """Return the run with its vocabulary size, from its settings or its corpus' manifest.

    Raises ConfigError if neither has it. Unlike `resolve` it reads one file and checks nothing.
    """
    if config.model.vocab_size:
        return config
    manifest = config.data.directory() / "train" / MANIFEST_NAME
    if not manifest.is_file():
        raise ConfigError(
            "model.vocab_size is not set and there is no corpus at "
            f"{path_text(absolute(config.data.path))} to read it from; set it, or build the corpus"
        )
    return _with_vocab_size(config, read_vocab_size(manifest))


def with_precision(config: RunConfig, best: Precision) -> RunConfig:
    """Return the run with the precision that `auto` stands for where `best` is the best one."""
    precision = resolved_precision(config.engine.precision, best)
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


def _with_vocab_size(config: RunConfig, vocab_size: int) -> RunConfig:
    return replace(config, model=replace(config.model, vocab_size=vocab_size))
