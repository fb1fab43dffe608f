"""What one demo is made of: its places and the numbers that follow from its length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.yaml_files import SHIPPED
from pretrain.config.run import RunConfig
from pretrain.rundir.run_dir import RunDir

CONFIG = SHIPPED / "experiments" / "demo.yaml"
RANKS = 2
FEWEST_STEPS = 16
NUM_CHECKPOINTS = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where a demo lies, what it reads, how long it trains."""

    directory: Path
    corpus: Path | None  # the user's folder; None: the standard library
    run: RunConfig
    overrides: tuple[str, ...]  # what makes `run` out of the experiment file

    @property
    def documents(self) -> Path:
        return self.directory / "text" / "documents.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.directory / "tokenizer"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def undisturbed(self) -> RunDir:
        return RunDir(self.directory / "undisturbed")

    @property
    def killed(self) -> RunDir:
        return RunDir(self.directory / "killed")

    @property
    def report(self) -> Path:
        return self.directory / "report.html"

    @property
    def steps(self) -> int:
        return self.run.optim.steps

    @property
    def kill_after(self) -> int:
        """Past the middle, and half-way between two checkpoints, so that some steps are lost and made again."""
        interval = self.run.checkpoint.interval
        return self.steps // 2 // interval * interval + (interval + 1) // 2


def make_settings(directory: Path, corpus: Path | None, steps: int) -> Settings:
    """A demo of `steps` steps, 0 for as many as the experiment file says; ConfigError if they are too few."""
    if not CONFIG.is_file():
        raise ConfigError(f"{CONFIG} is missing; run the demo from a clone of the repository")
    if steps and steps < FEWEST_STEPS:
        raise ConfigError(
            f"--steps {steps} leaves no time to be killed in; use {FEWEST_STEPS} or more"
        )
    if corpus is not None and not corpus.is_dir():
        raise DataError(
            f"--corpus {corpus} is no folder; give one with text files (or JSONL) in it"
        )
    steps = steps or load_config(RunConfig, CONFIG).optim.steps
    interval = max(1, steps // NUM_CHECKPOINTS)
    overrides = (
        f"data.path={(directory / 'data').resolve()}",
        f"optim.steps={steps}",
        f"optim.schedule.warmup_steps={steps // 4}",
        f"checkpoint.interval={interval}",
        f"evaluation.interval={4 * interval}",
        f"metrics.interval={max(1, min(5, interval // 4))}",
    )
    run = load_config(RunConfig, CONFIG, overrides)
    return Settings(directory=directory, corpus=corpus, run=run, overrides=overrides)
