"""What several tests of this folder read."""

from pathlib import Path

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.corpus import Corpus
from foundation.files import write_text
from pretrain.sweeps.cell_runs import config_of
from pretrain.sweeps.sweep_file import read_sweep
from tests.helpers.scaling_runs import EXPERIMENT, command, train_by_the_law

TEXTS = [
    f"entry {number}: na\u00efve \u2192 {'ab' * (number % 7)}\n" * (1 + number % 5)
    for number in range(40)
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    """The validation split of forty short texts with characters of several bytes."""
    root: Path = tmp_path_factory.mktemp("corpus")
    (root / "text").mkdir()
    for number, words in enumerate(TEXTS):
        (root / "text" / f"{number:02}.txt").write_text(words, encoding="utf-8")
    build_corpus(
        CorpusConfig(
            input=(root / "text",),
            output=root / "data",
            validation_fraction=0.3,
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=320),
        )
    )
    return Corpus.open(root / "data" / "validation")


@pytest.fixture(scope="session")
def swept(tmp_path_factory) -> Path:
    """The folder of a planned scaling sweep whose cells have all run."""
    directory = tmp_path_factory.mktemp("sweep")
    write_text(directory / "books.yaml", EXPERIMENT)
    sweep_path = directory / "sweep.yaml"
    budgets = ("--budgets", "1e14", "1e15", "1e16", "--no-checks", "--holdout-budgets", "1e17")
    assert (
        command("plan", directory / "books.yaml", *budgets, "--sizes", 6, "--output", sweep_path)
        == 0
    )
    for cell in read_sweep(sweep_path).cells:
        train_by_the_law(directory / "runs" / cell.name, config_of(cell, sweep_path))
    return directory


@pytest.fixture(scope="session")
def collected(swept) -> Path:
    """The same with the tables that `pretrain scale collect` writes."""
    outputs = ("--output", swept / "runs.csv")
    assert command("collect", swept / "sweep.yaml", "--runs-dir", swept / "runs", *outputs) == 0
    return swept
