"""Loss by document position, and attention by distance, on the text of a split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pretrain.config.data import DataConfig
from pretrain.config.run import RunConfig
from pretrain.evaluation.evaluate import TrainedScorer
from pretrain.evaluation.probes.attention_mass import AttentionMass, attention_mass, measured_stream
from pretrain.evaluation.probes.distances import bin_names, bins_of, first_distances
from pretrain.evaluation.probes.document_position import document_positions, loss_by_position
from pretrain.model.lane_state import num_compressed_rows
from pretrain.model.layer import TransformerLayer
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.trained_model import TrainedModel
from tests.helpers.exact_attention import exact_attention
from tests.helpers.models import VARIANTS, tiny_model

MEMORY, SEGMENT = 8, 6


def scorer_of(model: TransformerXL, corpus, world) -> TrainedScorer:
    run = RunConfig(model=model.config, data=DataConfig(lanes=2))
    return TrainedScorer(TrainedModel(model.eval(), run, 0, corpus.directory.parent), world)


def model_for(corpus, **options) -> TransformerXL:
    return tiny_model(vocab_size=corpus.manifest.vocab_size, **options)


def test_bins_are_powers_of_two():
    distances = torch.tensor([-3, 0, 1, 2, 3, 4, 7, 8, 1023, 1024])
    assert bins_of(distances).tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 10, 11]
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
                by_bin.setdefault(int(bins_of(torch.tensor(position))), []).append(loss)
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


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "clamp",
        "isolated",
        "rope",
        "alibi",
        "t5",
        "sinks",
        "scaled",
        "deltanet_compressive",
    ],
)
def test_attention_by_distance_equals_that_of_each_pair_in_float64(corpus, name):
    model = model_for(corpus, **VARIANTS[name])
    found = attention_mass(model, corpus, memory_length=MEMORY, segment_length=SEGMENT)
    expected = direct_attention(model, corpus, found)
    for part in found.mass:
        torch.testing.assert_close(
            torch.tensor(found.mass[part], dtype=torch.float64),
            expected[part],
            rtol=1e-9,
            atol=1e-12,
        )
    torch.testing.assert_close(
        torch.tensor(found.entropy, dtype=torch.float64), expected["entropy"], rtol=1e-9, atol=1e-9
    )
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
        if isinstance(layer, TransformerLayer)
    ]
    config = model.config
    num_bins, sums, queries, memory = len(found.first_distances), {}, 0, None
    stream, warm_up = measured_stream(corpus, config, MEMORY, SEGMENT)
    for number, batch in enumerate(stream):
        compressed = num_compressed_rows(config, memory)
        taken.clear()
        with torch.no_grad():
            _, memory, _ = model.hidden_states(
                torch.from_numpy(batch.tokens_BL), memory, torch.from_numpy(batch.starts_BL),
                memory_length=MEMORY,
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
    layers = range(config.num_attention_layers)
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
