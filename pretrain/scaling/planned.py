"""How every plan ends: as a sweep file whose cells are the experiment's file plus overrides."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from data_pipeline.config_loader import differences, load_config, to_tree
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import SPLITS
from data_pipeline.errors import DataError
from pretrain.config.run import RunConfig
from pretrain.costs.flops import RunCost
from pretrain.scaling.sweep_file import FORMAT, Cell, Sweep, write_sweep
from pretrain.terminal.text import counted


class Planned(Protocol):
    """A run that a plan has made."""

    @property
    def name(self) -> str: ...

    @property
    def run(self) -> RunConfig: ...

    @property
    def cost(self) -> RunCost: ...

    @property
    def holdout(self) -> bool: ...

    @property
    def facts(self) -> Mapping[str, float]:
        """What is noted beside the cell."""
        ...


def check_tokens(base: RunConfig, runs: Sequence[Planned]) -> list[str]:
    """DataError when a run reads more than one epoch; a note where the corpus is not on this machine."""
    directory = base.data.directory() / SPLITS[0]
    if not directory.is_dir():
        return [f"note: no corpus at {base.data.path}, so nothing checks that it has enough tokens"]
    available = Corpus.open(directory, check_hashes=False).num_tokens
    refuse_more_tokens({item.name: item.cost.tokens for item in runs}, available)
    return []


def refuse_more_tokens(tokens: Mapping[str, int], available: int) -> None:
    """DataError when a cell (name -> tokens) would read more than one epoch: repeated tokens are worth less."""
    greedy = [name for name, count in tokens.items() if count > available]
    if greedy:
        worst = max(greedy, key=tokens.__getitem__)
        raise DataError(
            f"{len(greedy)} of {len(tokens)} cells need more tokens than the corpus has ({available:,}); {worst} "
            f"needs {tokens[worst]:,}: use smaller budgets, larger sizes or more text"
        )


def sweep_path(arguments: argparse.Namespace, name: str) -> Path:
    """Where the sweep of this name is written."""
    return arguments.out or Path("configs/sweeps") / f"{name}.yaml"


def write_plan(
    arguments: argparse.Namespace,
    name: str,
    base: RunConfig,
    runs: Sequence[Planned],
    notes: Sequence[str],
) -> None:
    """Write the runs as the sweep `name` and say where; `base` is the experiment with what --set changes."""
    path = sweep_path(arguments, name)
    write_sweep(path, make_sweep(name, arguments.experiment, base, runs, path.parent, notes))
    print(f"sweep: {path} ({counted(len(runs), 'cell')})")


def make_sweep(
    name: str,
    experiment: Path,
    base: RunConfig,
    runs: Sequence[Planned],
    directory: Path,
    notes: Sequence[str],
) -> Sweep:
    """The runs as a sweep whose file will lie in `directory`.

    Cells start from the experiment's file, so what `base` sets beside it is an override too. A vocabulary that `base`
    leaves unset stays unset: the corpus decides when the cell runs.
    """
    plain = load_config(RunConfig, experiment)
    relative = Path(os.path.relpath(experiment.resolve(), directory.resolve()))
    cells = [
        Cell(
            name=item.name,
            experiment=relative,
            overrides=tuple(_overrides_between(plain, _with_vocabulary_of(base, item.run))),
            facts=dict(item.facts),
            holdout=item.holdout,
        )
        for item in runs
    ]
    return Sweep(format=FORMAT, name=name, notes=tuple(notes), cells=tuple(cells))


def _with_vocabulary_of(base: RunConfig, run: RunConfig) -> RunConfig:
    return replace(run, model=replace(run.model, vocab_size=base.model.vocab_size))


def _overrides_between(base: RunConfig, run: RunConfig) -> list[str]:
    """What to add to the base's file to get the run."""
    return [f"{key}={new}" for key, (_, new) in differences(to_tree(base), to_tree(run)).items()]
