from __future__ import annotations

import math

import pytest
import torch

from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError
from pretrain.evaluation.probes.distances import borders_of, wilson_interval
from pretrain.evaluation.probes.recall import (
    ProbeTokens,
    Recall,
    RecallKind,
    distances_up_to,
    drawn_trials,
    measure_recall,
    recall_distance,
    tokens_of_corpus,
    tokens_of_vocabulary,
)
from tests.helpers.induction import induction_model
from tests.helpers.models import VARIANTS, tiny_model

KINDS: tuple[RecallKind, ...] = ("needle", "copy")
MEMORY, SEGMENT = 16, 8
END = 40  # of 41 tokens
TOKENS = ProbeTokens(torch.arange(0, END, 2), torch.arange(1, END, 2), None, END)


def recalled(module, kind: RecallKind, distance: int, tokens=TOKENS, **options) -> Recall:
    settings = {"memory_length": MEMORY, "segment_length": SEGMENT, "num_trials": 64, "seed": 0}
    return measure_recall(kind, module, tokens, distance, **{**settings, **options})


# Newcombe 1998, table I: the score method.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_the_published_one(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_copies_from_its_memory_recalls_as_far_as_it_reaches(kind):
    """The cue's successor is d - 1 keys back; a segment's token i sees i + 16."""
    model = induction_model(END + 1, MEMORY)
    direct = borders_of(model.config, MEMORY, SEGMENT).direct
    assert direct == MEMORY + SEGMENT
    for distance in (SEGMENT, MEMORY + 1):
        found = recalled(model, kind, distance)
        assert found.accuracy == 1.0
        assert found.loss < 1e-9
        assert found.high == 1.0
    between = recalled(model, kind, MEMORY + SEGMENT // 2)
    assert 0.2 < between.accuracy < 0.9
    for distance in (direct + 1, 4 * direct):
        found = recalled(model, kind, distance, num_trials=256)
        assert found.low <= found.chance <= found.high
        assert not found.is_recalled
    assert recalled(model, kind, direct + 1, memory_length=4 * MEMORY).accuracy == 1.0


@pytest.mark.parametrize(
    ("kind", "name"), [("needle", "plain"), ("copy", "rope"), ("needle", "compressive_rope")]
)
def test_beyond_all_layers_there_is_only_chance(kind, name):
    model = tiny_model(**VARIANTS[name]).eval()
    total = borders_of(model.config, 8, SEGMENT).total
    tokens = ProbeTokens(torch.arange(0, 36, 2), torch.arange(1, 36, 2), None, 36)
    found = recalled(model, kind, total + 1, tokens, memory_length=8, num_trials=128)
    assert found.low <= found.chance <= found.high
    assert found.tokens == 128 * (1 if kind == "needle" else 7)


def test_chance_is_one_of_the_candidates_that_are_left():
    """Of 20, the needle leaves 16 after its key, the copy 19 to 13."""
    model = induction_model(END + 1, MEMORY)
    assert recalled(model, "needle", 8).chance == 1 / 16
    copy = recalled(model, "copy", 8)
    assert copy.chance == pytest.approx(sum(1 / count for count in range(13, 20)) / 7)
    assert copy.chance_loss == pytest.approx(sum(math.log(count) for count in range(13, 20)) / 7)


@pytest.mark.parametrize(("kind", "distance"), [("needle", 8), ("copy", 9), ("needle", 40)])
def test_a_pattern_is_repeated_at_its_distance_and_nowhere_else(kind, distance):
    trials = drawn_trials(kind, TOKENS, distance, 13, 6, torch.Generator().manual_seed(2))
    stream_BT, length = trials.tokens_BT, 8 if kind == "copy" else 5
    assert (stream_BT[:, 0] == END).all()
    first_BX = stream_BT[:, 14 : 14 + length]
    assert torch.equal(first_BX, stream_BT[:, -length:])
    assert stream_BT.shape[1] == 14 + distance + length
    is_candidate_BT = torch.isin(stream_BT, TOKENS.candidates)
    assert int(is_candidate_BT.sum()) == 6 * 2 * length
    assert all(len(set(row)) == length for row in first_BX.tolist())


def test_seed_and_distance_fix_the_trials():
    model = induction_model(END + 1, MEMORY)
    distance = MEMORY + 4
    assert recalled(model, "copy", distance) == recalled(model, "copy", distance)
    assert recalled(model, "copy", distance) != recalled(model, "copy", distance, seed=1)


def test_distances_are_powers_of_two_and_the_borders():
    assert distances_up_to(100, (24, 64, 300)) == [8, 16, 24, 32, 64, 100]
    with pytest.raises(ConfigError, match="expected 8 or more"):
        distances_up_to(7, ())


def test_recall_ends_before_the_first_distance_at_chance():
    def at(distance: int, low: float, accuracy: float = 0.5) -> Recall:
        return Recall(distance=distance, accuracy=accuracy, low=low, high=1.0, chance=0.1, loss=1.0,
                      chance_loss=2.0, trials=9, tokens=9)  # fmt: skip

    assert recall_distance([at(8, 0.4), at(16, 0.2), at(32, 0.1), at(64, 0.4)]) == 16
    assert recall_distance([at(8, 0.05)]) == 0
    one_of_eight, _ = wilson_interval(1, 8)
    assert recall_distance([at(8, one_of_eight, 1 / 8)]) == 0, "a single hit is no recall"


def test_tokens_of_a_corpus_are_frequent_ones(corpus):
    tokens = tokens_of_corpus(corpus)
    assert tokens.text is not None
    ids, counts = tokens.text.unique(return_counts=True)
    chosen = torch.cat([tokens.candidates, tokens.fillers])
    assert len(chosen.unique()) == len(chosen) == len(ids)
    assert corpus.manifest.end_id not in chosen
    assert corpus.manifest.end_id not in tokens.text
    frequent = int(ids[counts.argmax()])
    assert frequent == tokens.candidates[0]
    text_BX = tokens.haystack(3, 50, torch.Generator().manual_seed(0))
    assert not torch.isin(text_BX, tokens.fillers).all()


@pytest.mark.parametrize("tokenizer", [
    Tokenizer("bytes"), Tokenizer("unknown", options={"vocab_size": 50, "end_id": 7}),
], ids=["bytes", "unknown"])  # fmt: skip
def test_a_vocabulary_alone_gives_tokens(tokenizer):
    tokens = tokens_of_vocabulary(tokenizer)
    chosen = torch.cat([tokens.candidates, tokens.fillers])
    assert len(chosen.unique()) == min(256, tokenizer.vocab_size - 1)
    assert tokenizer.end_id not in chosen
    assert int(chosen.max()) < tokenizer.vocab_size
    tiny = Tokenizer("unknown", options={"vocab_size": 12, "end_id": 7})
    with pytest.raises(ConfigError, match="needle and copy need 18"):
        tokens_of_vocabulary(tiny)
