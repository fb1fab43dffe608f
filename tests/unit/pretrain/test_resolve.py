"""A run's settings mean the same from every directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, MixturePart, TokenizerConfig
from foundation.errors import ConfigError, DataError
from pretrain.config.data import DataConfig, PhaseConfig
from pretrain.config.model import ModelConfig
from pretrain.config.resolve import resolve, with_absolute_paths, with_vocabulary
from pretrain.config.run import RunConfig


def test_every_path_of_a_run_becomes_absolute(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parts = (MixturePart(path=Path("a")), MixturePart(path=Path("b")))
    later = PhaseConfig(from_step=5, mixture=(MixturePart(path=Path("c")),))
    run = RunConfig(
        initial_weights=Path("w"), data=DataConfig(path=Path("d"), mixture=parts, phases=(later,))
    )
    found = with_absolute_paths(run)
    paths = [found.initial_weights, found.data.path, *(part.path for part in found.data.mixture)]
    paths += [part.path for part in found.data.phases[0].mixture]
    assert paths == [tmp_path / name for name in "wdabc"]


def test_what_a_small_corpus_cannot_serve_is_rejected_before_training(tmp_path: Path) -> None:
    for name, length in (("a", 20), ("b", 40)):
        (tmp_path / f"{name}.txt").write_text("x" * length)
    tokenizer = TokenizerConfig(kind="bytes")
    text = (tmp_path / "a.txt", tmp_path / "b.txt")
    without = CorpusConfig(
        input=text, output=tmp_path / "c", validation_fraction=0, tokenizer=tokenizer
    )
    build_corpus(without)
    with pytest.raises(DataError, match=r"62 tokens are too few for 16 lanes.*data\.lanes=1"):
        resolve(RunConfig(data=DataConfig(path=tmp_path / "c")))
    fitting = DataConfig(path=tmp_path / "c", lanes=1, segment_length=62)
    with pytest.raises(DataError, match="has no validation split"):
        resolve(RunConfig(data=fitting))
    (tmp_path / "v.txt").write_text("y" * 5)
    build_corpus(
        CorpusConfig(
            input=text,
            output=tmp_path / "d",
            validation_input=(tmp_path / "v.txt",),
            tokenizer=tokenizer,
        )
    )
    fitting = DataConfig(path=tmp_path / "d", lanes=1, segment_length=62)
    (shard,) = (tmp_path / "d" / "train").glob("*.mds")
    shard.write_bytes(bytes(shard.stat().st_size))
    # No shard is read: each rank reads its own later. Files in configs/models have a vocabulary.
    for vocab_size in (0, 32_000):
        run = RunConfig(model=ModelConfig(vocab_size=vocab_size), data=fitting)
        assert resolve(run).model.vocab_size == with_vocabulary(run).model.vocab_size == 257


def test_a_missing_corpus_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunConfig(data=DataConfig(path=Path("p")))
    with pytest.raises(ConfigError, match=f"no corpus at {tmp_path}/p to read it from; set it, or"):
        with_vocabulary(run)
    with pytest.raises(DataError, match=f"^{tmp_path}/p/train does not exist"):
        resolve(run)
