"""Evaluation against forward passes, context lengths by their rule, and probes pair by pair."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.evaluation_stream import EvaluationStream
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError
from pretrain.config.run import DataConfig, ModelConfig, PhaseConfig, RunConfig
from pretrain.evaluation.context_length import (
    ContextGrid,
    Losses,
    SplitPositions,
    relative_effective_context_lengths,
)
from pretrain.evaluation.evaluate import EvaluationResult, TrainedScorer, evaluate
from pretrain.evaluation.probes.attention_mass import AttentionMass, attention_mass, measured_stream
from pretrain.evaluation.probes.document_position import (
    bin_names,
    distance_bins,
    document_positions,
    first_distances,
    loss_by_position,
    memory_borders,
    wilson_interval,
)
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
from pretrain.model.cached import new_stream
from pretrain.model.layer import RowsLayer
from pretrain.model.memory import document_starts, num_compressed_rows
from pretrain.model.transformer_xl import TransformerXL
from pretrain.rundir.evaluated_text import EvaluatedText, difference_error
from pretrain.weights.export import TrainedModel
from tests.helpers.exact_attention import exact_attention
from tests.helpers.induction import induction_model
from tests.helpers.models import VARIANTS, tiny_model


@pytest.fixture
def scorer(corpus, world, request):
    """Scores with a tiny model, of the variant that a test names as its parameter."""
    options = VARIANTS[getattr(request, "param", "plain")]
    return scorer_of(model_for(corpus, **{"memory_length": 16, **options}), corpus, world)


def measured(scorer, corpus, **options) -> EvaluationResult:
    return evaluate(
        scorer, corpus, **{"memory_length": 16, "segment_length": 8, "num_lanes": 2, **options}
    )


def targets_in_order(corpus: Corpus, max_tokens: int = 0) -> torch.Tensor:
    """The targets of one lane, as evaluation reads them."""
    batches = EvaluationStream(corpus, 1, 8, range(1), max_tokens, heads=True)
    return torch.cat([torch.from_numpy(each.targets_BL[each.valid_BL]) for each in batches])


@pytest.mark.parametrize(("step", "length"), [(0, 16), (4, 16), (5, 32), (9, 64)])
def test_segments_are_as_long_as_in_the_phase_of_the_last_update(tmp_path, step, length):
    lengths = {4: 32, 8: 64}
    phases = tuple(PhaseConfig(from_step=at, segment_length=lengths[at]) for at in lengths)
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


@pytest.mark.parametrize("kind", ["ntk", "yarn"])
def test_the_memory_length_that_was_asked_for_stretches_rope_in_a_small_part_too(
    corpus, world, kind
):
    model = model_for(corpus, positions="rope", rope_extension=kind, memory_length=8).eval()
    model.trained_keys = (16,) * model.config.num_layers
    scorer = scorer_of(model, corpus, world)
    for length in (100, 400):  # of 60 tokens that are read
        found = measured(scorer, corpus, num_lanes=1, memory_length=length, max_tokens=60)
        stream, losses = new_stream(model, length, 8), []
        for batch in EvaluationStream(corpus, 1, 8, range(1), 60, heads=True):
            given = (batch.tokens_BL, batch.targets_BL, batch.starts_BL)
            nll_BL = stream.nll_BL(*(torch.from_numpy(each) for each in given))
            losses.append(nll_BL[torch.from_numpy(batch.valid_BL)])
        assert found.loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)


def test_the_standard_error_is_of_the_ratio_over_documents(scorer, corpus):
    result = measured(scorer, corpus, num_lanes=3)
    losses_P, tokens_P = np.array(result.text.parts).T
    assert result.text.documents == corpus.num_documents
    assert result.text.tokens == result.tokens
    assert (losses_P * tokens_P).sum() / tokens_P.sum() == pytest.approx(result.loss, abs=1e-5)
    without_P = [
        np.average(np.delete(losses_P, part), weights=np.delete(tokens_P, part))
        for part in range(len(tokens_P))
    ]
    variance = (len(tokens_P) - 1) * np.var(without_P)  # the jackknife's
    assert result.text.standard_error == pytest.approx(math.sqrt(variance), rel=0.1)
    assert difference_error(result.text, result.text) == 0.0
    assert difference_error(result.text, EvaluatedText(1, ((2.0, 3), (2.0, 4)))) is None


def test_bits_are_those_of_the_text(scorer, corpus):
    result = measured(scorer, corpus)
    bits = result.loss * result.tokens / math.log(2)
    assert result.bits_per_byte == pytest.approx(bits / corpus.num_bytes)
    assert result.bits_per_character == pytest.approx(bits / corpus.num_characters)
    assert corpus.num_bytes > corpus.num_characters, "the text has characters of several bytes"


def test_a_part_of_the_split_is_measured_by_the_bytes_of_its_own_tokens(scorer, corpus):
    part = measured(scorer, corpus, num_lanes=1, max_tokens=corpus.num_tokens // 2)
    assert 0 < part.tokens < corpus.num_tokens
    tokens = targets_in_order(corpus, part.tokens).tolist()
    text = Tokenizer.load(corpus.tokenizer_directory).decode(tokens)
    bits = part.loss * part.tokens / math.log(2)
    # A character may be cut at the end.
    assert part.bits_per_byte == pytest.approx(bits / len(text.encode()), rel=0.02)
    assert part.bits_per_character == pytest.approx(bits / len(text), rel=0.02)


CONTEXTS = ContextGrid(step=10, longest=100)


def falling_until(end: int, start: float = 5.0) -> Losses:
    """Each further 10 tokens lower the loss by .05 up to `end` tokens, then no more."""
    return lambda length: torch.full((8,), start - 0.005 * min(length, end), dtype=torch.float64)


def test_the_length_is_where_gains_over_the_best_model_of_the_group_end() -> None:
    poor, good = falling_until(100, start=6.0), falling_until(50)
    for models, lengths, reach_longest in (
        ([falling_until(60)], [60], [False]),
        ([falling_until(1000)], [100], [True]),
        ([poor, good], [10, 50], [False, False]),  # always worse: it gains nothing
        ([poor], [100], [True]),
    ):
        found = [each for (each,) in relative_effective_context_lengths(models, CONTEXTS, [1.0])]
        assert [each.length for each in found] == lengths
        assert [each.reached_longest for each in found] == reach_longest
    ((found,),) = relative_effective_context_lengths([falling_until(60)], CONTEXTS, [1.0])
    assert found.gains == pytest.approx([1 - math.exp(-0.05)] * 5 + [0.0])


def test_shares_take_the_hardest_positions() -> None:
    """Only the hardest of ten positions keeps gaining."""

    def losses(length: int) -> Tensor:
        losses_P = torch.ones(10, dtype=torch.float64)
        losses_P[3] = 9.0 - 0.01 * length
        return losses_P

    ((hardest, all_positions),) = relative_effective_context_lengths([losses], CONTEXTS, [0.1, 1.0])
    assert hardest.length == 100
    assert all_positions.length == 10  # a tenth of .1 nats is below one percent


@pytest.mark.parametrize("positions", ["relative", "rope"])
@pytest.mark.parametrize("length", [1, 7, 12])
def test_a_position_sees_exactly_that_many_tokens(corpus, positions, length) -> None:
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "init_std": 0.3}
    config = ModelConfig(vocab_size=corpus.manifest.vocab_size, positions=positions, **sizes)
    module = TransformerXL(config).double().eval()
    positions = SplitPositions(corpus, 70, longest=30, lanes=length)
    found_P = positions.losses(module, length, memory_length=30, segment_length=5)
    for index in (0, 1, 69):
        offset = int(positions.offsets_P[index])
        window_W = positions.tokens_T[offset - length : offset + 1]
        with torch.no_grad():
            nll_BL, _ = module(window_W[None, :-1], window_W[None, 1:], memory_length=30)
        assert float(found_P[index]) == pytest.approx(float(nll_BL[0, -1]), abs=1e-10)
    assert len(found_P) == len(positions) == 70


def test_a_short_split_has_fewer_positions_and_too_short_a_one_is_refused(corpus) -> None:
    assert len(SplitPositions(corpus, 10**9, longest=30)) == corpus.num_tokens - 30
    with pytest.raises(ConfigError):
        SplitPositions(corpus, 5, longest=10**9)


KINDS: tuple[RecallKind, ...] = ("needle", "copy")
MEMORY, SEGMENT = 16, 8
END = 40  # of 41 tokens
TOKENS = ProbeTokens(torch.arange(0, END, 2), torch.arange(1, END, 2), None, END)


def scorer_of(model: TransformerXL, corpus, world) -> TrainedScorer:
    run = RunConfig(model=model.config, data=DataConfig(lanes=2))
    return TrainedScorer(TrainedModel(model.eval(), run, 0, corpus.directory.parent), world)


def model_for(corpus, **options) -> TransformerXL:
    return tiny_model(vocab_size=corpus.manifest.vocab_size, **options)


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
    direct = memory_borders(model.config, MEMORY, SEGMENT).direct
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
    total = memory_borders(model.config, 8, SEGMENT).total
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
    with pytest.raises(ConfigError, match="8 "):
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
    ids, counts = tokens.text.unique(return_counts=True)
    chosen = torch.cat([tokens.candidates, tokens.fillers])
    assert len(chosen.unique()) == len(chosen) == len(ids)
    assert corpus.manifest.end_id not in chosen
    assert corpus.manifest.end_id not in tokens.text
    frequent = int(ids[counts.argmax()])
    assert frequent == tokens.candidates[0]
    text_BX = tokens.haystack(3, 50, torch.Generator().manual_seed(0))
    assert not torch.isin(text_BX, tokens.fillers).all()


def test_a_vocabulary_too_small_for_the_probes_is_refused():
    tiny = Tokenizer("unknown", options={"vocab_size": 12, "end_id": 7})
    with pytest.raises(ConfigError, match="18"):
        tokens_of_vocabulary(tiny)


ROWS, TOKENS_READ = 8, 6


def test_bins_are_powers_of_two():
    distances = torch.tensor([-3, 0, 1, 2, 3, 4, 7, 8, 1023, 1024])
    assert distance_bins(distances).tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 10, 11]
    assert first_distances(5) == (0, 1, 2, 4, 8)
    assert bin_names((0, 1, 2, 4, 8)) == ["0", "1", "2-3", "4-7", "8+"]


def test_positions_count_from_the_last_start_across_batches():
    starts = np.array([[0, 1, 0, 0, 1, 1, 0, 0]], bool)
    whole = document_positions(np.array([4]), starts)
    assert whole.tolist() == [[5, 0, 1, 2, 0, 0, 1, 2]]
    first = document_positions(np.array([4]), starts[:, :3])
    assert (document_positions(first[:, -1], starts[:, 3:]) == whole[:, 3:]).all()


def test_each_position_has_the_losses_of_its_documents(corpus, world):
    """Against every document by itself, in a model that isolates documents."""
    model = model_for(corpus, isolate_documents=True, memory_length=400)
    (found,) = loss_by_position(
        scorer_of(model, corpus, world), corpus, (400,), segment_length=7, num_lanes=2
    )
    by_bin: dict[int, list[float]] = {}
    end_id = corpus.manifest.end_id
    for number in range(len(corpus.manifest.shards)):
        shard = corpus.shard(number)
        for document in range(len(shard)):
            targets = torch.from_numpy(shard.tokens(document).astype(np.int64))[None]
            inputs = torch.cat([torch.tensor([[end_id]]), targets[:, :-1]], 1)
            starts = torch.zeros_like(inputs, dtype=torch.bool)
            starts[0, 1] = True
            with torch.no_grad():
                nll_BL, _ = model(inputs, targets, None, starts)
            for position, loss in enumerate(nll_BL[0].tolist()):
                by_bin.setdefault(int(distance_bins(torch.tensor(position))), []).append(loss)
    assert found.tokens == tuple(len(by_bin[number]) for number in sorted(by_bin))
    # The first target is predicted from the end of the document before, which is isolated too.
    for number, losses in by_bin.items():
        if number:
            assert found.losses[number] == pytest.approx(np.mean(losses), rel=1e-12)
            if len(losses) == 1:
                assert found.margins[number] is None, "one token has no interval"
                continue
            margin = 1.96 * np.std(losses) / len(losses) ** 0.5
            assert found.margins[number] == pytest.approx(margin, rel=1e-3, abs=1e-6)


ATTENDED = ["plain", "clamp", "isolated", "rope", "alibi", "t5", "sinks", "scaled"]


@pytest.mark.parametrize("name", [*ATTENDED, "deltanet_compressive"])
def test_attention_by_distance_equals_that_of_each_pair_in_float64(corpus, name):
    model = model_for(corpus, **VARIANTS[name])
    found = attention_mass(model, corpus, memory_length=ROWS, segment_length=TOKENS_READ)
    expected = direct_attention(model, corpus, found)
    for part, values in {**found.mass, "entropy": found.entropy}.items():
        values = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(values, expected[part], rtol=1e-9, atol=1e-12)
    total = torch.tensor(found.total(), dtype=torch.float64).sum(-1)
    if model.config.attention_sinks:
        assert total.max() < 1.0
    else:
        torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-12, atol=0)
    assert max(map(max, found.entropy)) <= found.uniform_entropy + 1e-12


def direct_attention(model: TransformerXL, corpus, found: AttentionMass) -> dict[str, torch.Tensor]:
    """Weights pair by pair from attention's inputs, which a hook on each layer's own takes."""
    taken: list[tuple] = []

    def take(module, inputs, options):
        visibility = options["visibility"]
        taken.append((module.inputs(*inputs, visibility=visibility), visibility))

    handles = [
        layer.attention.register_forward_pre_hook(take, with_kwargs=True)
        for layer in model.layers
        if isinstance(layer, RowsLayer)
    ]
    config = model.config
    num_bins, sums, queries, memory = len(found.first_distances), {}, 0, None
    stream, warm_up = measured_stream(corpus, config, ROWS, TOKENS_READ)
    for number, batch in enumerate(stream):
        compressed = num_compressed_rows(config, memory)
        taken.clear()
        with torch.no_grad():
            _, memory, _ = model.hidden_states(
                torch.from_numpy(batch.tokens_BL), memory, torch.from_numpy(batch.starts_BL),
                memory_length=ROWS,
            )  # fmt: skip
        if number < warm_up:
            continue
        queries += int(np.asarray(batch.valid_BL).sum())
        for layer, ((query, parts, terms), visibility) in enumerate(taken):
            key_BCGH, _ = torch.cat(parts, 1).unbind(2)
            B, C, G = key_BCGH.shape[:3]
            identity = torch.eye(C, dtype=torch.float64)[None, :, None].expand(B, C, G, C)
            weights_BLNC = exact_attention(
                query, key_BCGH, identity, terms.position_CNH, terms.content_bias_NH,
                terms.position_bias_NH, distance_bias_CN=terms.distance_bias_CN,
                sinks_N=terms.sinks_N, max_distance=visibility.window or None,
                documents_BC=visibility.documents_BC,
            )  # fmt: skip
            L = weights_BLNC.shape[1]
            weights_BLNC = weights_BLNC * torch.from_numpy(batch.valid_BL)[:, :, None, None]
            for row in range(L):
                for column in range(C - L + row + 1):
                    part = "segment" if column >= C - L else "memory"
                    part = "compressed" if column < compressed else part
                    key = (part, layer, (C - L + row - column).bit_length())
                    sums[key] = sums.get(key, 0.0) + weights_BLNC[:, row, :, column].sum(0)
            entropy = torch.special.entr(weights_BLNC).sum((0, 1, 3))
            sums["entropy", layer] = sums.get(("entropy", layer), 0.0) + entropy
    for handle in handles:
        handle.remove()
    assert queries == found.queries > 0
    none = torch.zeros(config.num_heads, dtype=torch.float64)
    layers = range(config.num_layers_with_rows)
    return {
        "entropy": torch.stack([sums["entropy", layer] for layer in layers]) / queries,
        **{
            part: torch.stack([
                torch.stack([sums.get((part, layer, x), none) for x in range(num_bins)], -1)
                for layer in layers
            ]) / queries
            for part in found.mass
        },
    }  # fmt: skip
