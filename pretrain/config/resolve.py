"""A run's settings completed by what its corpus says. Torch-free."""

from __future__ import annotations

import dataclasses

from data_pipeline.errors import UserError
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import open_training_data
from data_pipeline.location import shown
from data_pipeline.tokenizer import Tokenizer
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig


def resolve(config: RunConfig) -> RunConfig:
    """Fill in what follows from the corpus, the vocabulary size; refuse a corpus that cannot fill the lanes."""
    phases = runs_of_phases(config)
    corpora = [
        open_training_data(phase.data.path, phase.data.mixture, phase.data.cache)
        for phase in phases
    ]
    for phase, corpus in zip(phases, corpora, strict=True):
        LaneStream(corpus, phase.data.lanes, config.seed, phase.data.segment_length, range(1))
    vocab_size = Tokenizer.load(corpora[0].tokenizer_directory).vocab_size  # all have the same
    if config.model.vocab_size not in (0, vocab_size):
        raise UserError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer of {shown(config.data.path)} has "
            f"{vocab_size} tokens; leave the setting out, it is taken from the corpus"
        )
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=vocab_size)
    )
