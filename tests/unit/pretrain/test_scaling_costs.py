"""Parameters as plans and tables count them, against published architectures."""

from __future__ import annotations

import csv

import pytest

from pretrain.config import ModelConfig, RunConfig
from pretrain.scaling.costs import cost_of
from tests.helpers.shared import shared_path


def test_all_50_architectures_of_hoffmanns_table_a9_match_within_0_7_per_cent():
    """Counted as a Transformer-XL with heads * key size as attention width and 32,000 tied embeddings."""
    rows = list(csv.DictReader(shared_path("data/scaling/chinchilla_models_tableA9.csv").open()))
    assert len(rows) == 50
    for row in rows:
        model = ModelConfig(
            vocab_size=32000,
            num_layers=int(row["n_layers"]),
            d_model=int(row["d_model"]),
            num_heads=int(row["n_heads"]),
            d_head=int(row["kv_size"]),
            d_inner=int(row["ffw_size"]),
        )
        assert cost_of(RunConfig(model=model)).parameters == pytest.approx(float(row["params"]), rel=0.007)


def test_one_of_table_a9s_shapes_matches_its_published_size():
    model = ModelConfig(vocab_size=32000, num_layers=8, d_model=512, num_heads=8, d_inner=2048)
    assert cost_of(RunConfig(model=model)).parameters == pytest.approx(44e6, rel=0.007)
