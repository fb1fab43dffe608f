from __future__ import annotations

import math

import pytest
import torch

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from data_pipeline.tokenizer import Tokenizer
from pretrain.config.data import DataConfig, PhaseConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.evaluation.evaluate import (
    EvaluationResult,
    TrainedScorer,
    evaluate,
)
from pretrain.model.memory import document_starts
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.trained_model import TrainedModel
from tests.helpers.models import VARIANTS


@pytest.fixture
def scorer(corpus, request):
    """Scores with a tiny model, of the variant that a test names as its parameter."""
    torch.manual_seed(1)
    given = {"num_layers": 2, "d_model": 16, "num_heads": 2, "memory_length": 16, "init_std": 0.3}
    options = {**given, **VARIANTS[getattr(request, "param", "plain")]}
    config = ModelConfig(vocab_size=corpus.manifest.vocab_size, **options)
    run = RunConfig(model=config, data=DataConfig(lanes=2))
    trained = TrainedModel(TransformerXL(config).double().eval(), run, 0, corpus.directory.parent)
    yield TrainedScorer(trained, init_world())
    destroy_process_group()


def measured(scorer, corpus, **options) -> EvaluationResult:
    return evaluate(
        scorer, corpus, **{"memory_length": 16, "segment_length": 8, "num_lanes": 2, **options}
    )


def targets_in_order(corpus: Corpus, max_tokens: int = 0) -> torch.Tensor:
    """The targets of one lane, as evaluation reads them."""
    batches = list(EvaluationStream(corpus, 1, 8, range(1), max_tokens))
    return torch.cat(
        [torch.from_numpy(batch.targets_BL)[torch.from_numpy(batch.valid_BL)] for batch in batches]
    )


@pytest.mark.parametrize(("step", "length"), [(0, 16), (4, 16), (5, 32), (9, 64)])
def test_segments_are_as_long_as_in_the_phase_of_the_last_update(tmp_path, step, length):
    phases = (
        PhaseConfig(from_step=4, segment_length=32),
        PhaseConfig(from_step=8, segment_length=64),
    )
    model = ModelConfig(vocab_size=5, num_layers=1, d_model=4, num_heads=1)
    run = RunConfig(model=model, data=DataConfig(segment_length=16, phases=phases))
    assert TrainedModel(TransformerXL(model), run, step, tmp_path).segment_length == length


def test_every_token_is_scored_once_for_any_lanes_and_segments(scorer, corpus):
    for num_lanes, segment_length in ((1, 8), (2, 5), (3, 64), (4, 1)):
        result = measured(scorer, corpus, num_lanes=num_lanes, segment_length=segment_length)
        assert result.tokens == corpus.num_tokens


@pytest.mark.parametrize("scorer", ["plain", "deltanet", "deltanet_alone", "scaled"], indirect=True)
def test_one_lane_with_a_memory_as_long_as_the_split_equals_one_forward_pass(scorer, corpus):
    tokens_L = targets_in_order(corpus)
    end = torch.tensor([corpus.manifest.end_id])
    inputs_BL = torch.cat([end, tokens_L[:-1]])[None]
    starts_BL = document_starts(inputs_BL, corpus.manifest.end_id)
    with torch.no_grad():
        nll_BL, _ = scorer.trained.module(
            inputs_BL, tokens_L[None], None, starts_BL, memory_length=len(tokens_L)
        )
    result = measured(scorer, corpus, num_lanes=1, memory_length=corpus.num_tokens)
    assert result.loss == pytest.approx(float(nll_BL.mean()), abs=1e-9)
    assert result.perplexity == pytest.approx(math.exp(result.loss))


def test_bits_are_those_of_the_text(scorer, corpus):
    result = measured(scorer, corpus)
    bits = result.loss * result.tokens / math.log(2)
    assert result.bits_per_byte == pytest.approx(bits / corpus.num_bytes)
    assert result.bits_per_character == pytest.approx(bits / corpus.num_characters)
    assert corpus.num_bytes > corpus.num_characters, "the text has characters of several bytes"


def test_a_part_of_the_split_is_measured_by_the_bytes_of_its_own_tokens(scorer, corpus):
    part = measured(scorer, corpus, num_lanes=1, max_tokens=corpus.num_tokens // 2)
    assert 0 < part.tokens < corpus.num_tokens
    text = Tokenizer.load(corpus.tokenizer_directory).decode(
        targets_in_order(corpus, part.tokens).tolist()
    )
    bits = part.loss * part.tokens / math.log(2)
    # A character may be cut at the end.
    assert part.bits_per_byte == pytest.approx(bits / len(text.encode()), rel=0.02)
    assert part.bits_per_character == pytest.approx(bits / len(text), rel=0.02)
