"""Whether a run can continue on a corpus: the data that it has trained on. Torch-free."""

from typing import Any

from data_pipeline.corpora.corpus_identity import VALIDATION, corpus_hash, split_hash, tokenizer_of
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from foundation.errors import DataError
from foundation.paths import path_text
from pretrain.config.evaluation_sets import hashes_of_sets, splits_of_sets
from pretrain.config.phases import runs_of_phases
from pretrain.config.resolve import resolve
from pretrain.config.run import RunConfig
from pretrain.rundir.events import Branched, TrainingBegan
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir


def checked_data(run_dir: RunDir, config: RunConfig) -> dict[str, Any]:
    """Return what a start records of its data, by the names of the event's fields.

    DataError if the run has trained with another tokenizer, or was evaluated on another validation
    split or on another set of that name. Cursors would notice another training split, but lanes
    that start again have none.
    """
    directory = config.data.directory()
    tokenizer, validation = tokenizer_of(directory).fingerprint, split_hash(directory, VALIDATION)
    sets = hashes_of_sets(splits_of_sets(config))
    before: dict[str, str] = {}
    for event in find_events(run_dir.ledger.read(), TrainingBegan, Branched):
        # No set can have the name "" or "/".
        before |= {"": event.tokenizer, "/": event.validation, **event.sets}
    for key, split, own in (
        ("", f"tokenizer {directory / TOKENIZER_DIRECTORY}", tokenizer),
        ("/", f"the validation split of {path_text(config.data.path)}", validation),
        *((name, f"evaluation.sets.{name}", digest) for name, digest in sets.items()),
    ):
        if before.get(key, "") not in ("", own):
            raise DataError(
                f"{split} has the hash {own[:16] or '(none)'}, the run in {run_dir.path} had "
                f"{before[key][:16]}; restore it, or choose another run directory"
            )
    parts = [part for phase in runs_of_phases(config) for part in phase.data.mixture]
    paths = {path_text(part.path): part.path for part in (config.data, *parts)}
    corpora = {
        name: corpus_hash(local_corpus_directory(path, config.data.cache))
        for name, path in paths.items()
    }
    return {"tokenizer": tokenizer, "validation": validation, "sets": sets, "corpora": corpora}


def refuse_other_data(run_dir: RunDir, config: RunConfig) -> None:
    """Raise UserError if `config` has other data than the run, on which it cannot continue."""
    own = run_dir.config
    if (own.data, own.evaluation.sets) != (config.data, config.evaluation.sets):
        checked_data(run_dir, resolve(config))
