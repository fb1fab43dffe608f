"""A run of a tiny model on a tiny corpus, without other ranks, for tests of single updates."""

from pathlib import Path

import torch

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from pretrain.config.run import DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.distributed.world import World
from tests.helpers.corpora import make_tiny_corpus

ALONE = World(0, 1, 0, torch.device("cpu"))  # without a process group


def tiny_run(directory: Path, optim: OptimConfig) -> RunConfig:
    """The run, whose corpus is built in `directory`."""
    corpus = make_tiny_corpus(directory / "corpus", documents=30)
    return RunConfig(
        model=ModelConfig(vocab_size=257, num_layers=2, d_model=16, num_heads=2, memory_length=4),
        data=DataConfig(path=corpus, lanes=2, segment_length=8),
        optim=optim,
        engine=EngineConfig(kind="torch"),
    )


def training_stream(run: RunConfig) -> LaneStream:
    """All lanes of the run, from the start."""
    corpus, data = Corpus.open(run.data.path / "train"), run.data
    return LaneStream(corpus, data.lanes, run.seed, data.segment_length, range(data.lanes))
