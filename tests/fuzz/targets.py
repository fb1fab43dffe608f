"""All targets, and the valid files that they change."""

from pathlib import Path

import yaml

from pretrain import cli as pretrain
from tests.fuzz.corpus_targets import (
    corpus_targets,
    list_targets,
    shard_targets,
    text_targets,
    token_targets,
    tokenizer_targets,
)
from tests.fuzz.run_targets import export_targets, mirror_targets, run_targets
from tests.fuzz.settings_targets import result_targets, settings_of_run, settings_targets
from tests.fuzz.target import Target, command
from tests.helpers.corpora import make_tiny_corpus


class Workplace:
    """The valid files, made once in a directory: corpora, a run, an export, settings."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self) -> dict[str, Target]:
        """Build everything, and say what to do with the files."""
        corpus = make_tiny_corpus(self.directory / "corpus", documents=12)
        experiment = self.directory / "experiment" / "experiment.yaml"
        experiment.parent.mkdir()
        experiment.write_text(yaml.safe_dump(settings_of_run(corpus)))
        run, export = self.directory / "run", self.directory / "export"
        command(pretrain.main, "train", experiment, "--run-dir", run)
        command(pretrain.main, "export", run, "--output", export)
        return {
            **corpus_targets(corpus),
            **shard_targets(self.directory, corpus),
            **tokenizer_targets(self.directory),
            **run_targets(run, experiment),
            **mirror_targets(self.directory / "mirror", run),
            **settings_targets(self.directory, experiment, corpus),
            **result_targets(self.directory),
            **text_targets(self.directory),
            **token_targets(self.directory),
            **list_targets(self.directory),
            **export_targets(export),
        }
