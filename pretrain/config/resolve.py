"""A run's settings, completed by what its corpus determines. Torch-free."""

from dataclasses import replace
from pathlib import Path

from data_pipeline.config import MixturePart
from data_pipeline.corpora.manifest import MANIFEST_NAME, read_manifest, read_vocab_size
from foundation.errors import ConfigError, EmptyLaneError, named_setting
from foundation.files import YAML_SUFFIXES
from foundation.paths import absolute, path_text, url_of
from pretrain.config.evaluation_sets import VALIDATION, splits_of_sets
from pretrain.config.model import Precision
from pretrain.config.phases import mixture_setting, run_at, runs_of_phases
from pretrain.config.run import RunConfig


def resolve(config: RunConfig) -> RunConfig:
    """Return the run with its vocabulary size; UserError if it cannot train on the corpus.

    Reads no shard, as every rank calls this for all lanes and later reads only its own.
    """
    # Imported late: commands that only estimate costs need no numpy.
    from data_pipeline.corpora.corpus_identity import tokenizer_of
    from data_pipeline.lanes.lane_plan import check_lanes
    from data_pipeline.lanes.mixture import open_training_data, plan_of

    corpus, empty = None, None
    for step in (0, *(phase.from_step for phase in config.data.phases)):
        phase, setting = run_at(config, step), mixture_setting(config, step)
        data = phase.data
        corpus = open_training_data(
            data.path, data.mixture, data.cache, data.manifest_hashes, setting
        )
        try:
            check_lanes(plan_of(corpus, data.lanes, phase.seed), corpus.manifest.longest_whole)
        except EmptyLaneError as error:
            empty = empty or error
    assert corpus is not None
    with named_setting("data.path"):
        read_manifest(config.data.directory() / VALIDATION)
    splits_of_sets(config)
    if empty:  # after all else, since `describe` goes on
        raise empty
    # All corpora have the same tokenizer. Its size replaces any that the settings give.
    size = tokenizer_of(corpus.tokenizer_directory.parent).vocab_size
    return _with_size(config, size)


def resolve_if_built(config: RunConfig) -> RunConfig:
    """Return what `resolve` does, if the corpus is there or a mixture is named.

    Otherwise return what `with_vocabulary` does: costs can be estimated before a corpus is built.
    """
    path = config.data.path
    is_there = url_of(path) is not None or (path / "train" / MANIFEST_NAME).is_file()
    if is_there or any(phase.data.mixture for phase in runs_of_phases(config)):
        return resolve(config)
    return with_vocabulary(config)


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Return the run with the vocabulary size of its corpus; without a corpus, of its settings.

    Raises ConfigError if neither has a size. Unlike `resolve`, reads one file and checks nothing.
    """
    if config.model.vocab_size and not (config.data.path / "train" / MANIFEST_NAME).is_file():
        return config
    manifest = config.data.directory() / "train" / MANIFEST_NAME
    if not manifest.is_file():
        raise ConfigError(
            "model.vocab_size is not set and there is no corpus at "
            f"{path_text(absolute(config.data.path))} to read it from; set it, or build the corpus"
        )
    return _with_size(config, read_vocab_size(manifest))


def _with_size(config: RunConfig, vocab_size: int) -> RunConfig:
    """Return the run with a vocabulary of this size; an adopted model keeps its own."""
    if not config.model.adopted:
        return replace(config, model=replace(config.model, vocab_size=vocab_size))
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the corpus has {vocab_size:,} tokens, the model knows {config.model.vocab_size:,}; "
            f"build it with tokenizer.path={config.initial_weights}"
        )
    return config


def with_precision(config: RunConfig, best: Precision) -> RunConfig:
    """Return the run with `best`, the best precision of its device, instead of `auto`.

    This decides about `engine.compile`, too: bf16 is the best of GPUs that the compiler knows.
    """
    precision, compiles = config.engine.precision, config.engine.compile
    precision = best if precision == "auto" else precision
    if compiles == "auto":
        compiles = best == "bf16" and config.compiles_if_possible
    return replace(config, engine=replace(config.engine, precision=precision, compile=compiles))


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
