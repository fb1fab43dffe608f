"""Settings, lanes and costs of ranks that share lanes; what they compute: tests/integration."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from foundation.errors import ConfigError
from pretrain.cli import main
from pretrain.commands.report import setup_of
from pretrain.config.data import DataConfig, PhaseConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import (
    RunConfig,
    accumulation_steps,
    lanes_of_rank,
    saved_lanes_of_rank,
)
from pretrain.config.sequence_ranks import num_groups
from pretrain.costs.device_memory import memory_parts
from pretrain.costs.flops import computed_flops_of_step

MODEL: dict[str, Any] = {
    "vocab_size": 100,
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "memory_length": 32,
}


def run_of(ranks: int, lanes: int = 8, length: int = 16, **settings: Any) -> RunConfig:
    model, engine = ModelConfig(**{**MODEL, **settings.pop("model", {})}), settings
    return RunConfig(
        model=model,
        data=DataConfig(lanes=lanes, segment_length=length),
        engine=EngineConfig(sequence_ranks=ranks, **engine),
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "segments": ({"length": 18}, "data.segment_length=18 does not divide by engine.sequence_ranks"),
    "a layer's memory": (
        {"model": {"memory_length": (32, 30)}},
        "model.memory_length: 30 does not divide by engine.sequence_ranks=4",
    ),
    "heads": ({"model": {"num_heads": 2}}, "model.num_heads=2 does not divide by"),
    "key heads": ({"model": {"num_key_heads": 2}}, "model.num_key_heads=2 does not divide by"),
    "compressed rows": ({"model": {"compressed_length": 8}}, "excludes compressed memory"),
    "a deltanet": (
        {"model": {"layer_kinds": ("deltanet", "attention")}},
        "needs attention in all layers, found a deltanet",
    ),
    "masks of the fused kernels": (
        {"model": {"attention_dropout": 0.1}},
        "with model.attention_dropout=0.1 needs engine.attention_kernel=plain, found auto",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_share_evenly_and_exactly_is_refused_in_a_line(name: str) -> None:
    settings, text = REFUSED[name]
    run_of(1, **settings)
    with pytest.raises(ConfigError, match=re.escape(text)) as error:
        run_of(4, **settings)
    assert "\n" not in str(error.value)


def test_memory_tokens_are_refused() -> None:
    run = run_of(1)
    tokens = replace(run.model, memory_tokens=4)
    optim = replace(run.optim, gradient_segments=2)
    with pytest.raises(ConfigError, match=r"engine\.sequence_ranks=2 excludes memory tokens"):
        replace(run, model=tokens, optim=optim, engine=EngineConfig(sequence_ranks=2))


def test_a_phase_whose_segments_do_not_divide_is_refused() -> None:
    run = run_of(4)
    data = replace(run.data, phases=(PhaseConfig(from_step=5, segment_length=18),))
    with pytest.raises(ConfigError, match=r"data\.segment_length=18 does not divide by"):
        runs_of_phases(replace(run, data=data))


@pytest.mark.parametrize(("ranks", "lanes", "world"), [(1, 6, 3), (2, 6, 4), (4, 6, 8), (8, 3, 8)])
def test_ranks_read_the_lanes_of_their_group_and_save_each_once(
    ranks: int, lanes: int, world: int
) -> None:
    run = run_of(ranks, lanes=lanes, length=64, model={"num_heads": 8})
    read = [lanes_of_rank(run, rank, world) for rank in range(world)]
    saved = [saved_lanes_of_rank(run, rank, world) for rank in range(world)]
    assert [lane for each in saved for lane in each] == list(range(lanes))
    assert all(set(own) <= set(of_group) for own, of_group in zip(saved, read, strict=True))
    groups = [set(map(tuple, read[n : n + ranks])) for n in range(0, world, ranks)]
    assert [len(group) for group in groups] == [1] * len(groups)
    assert accumulation_steps(run, world) == 1


@pytest.mark.parametrize(
    ("world", "text"),
    [
        (6, "engine.sequence_ranks=4 does not divide 6 ranks; use a multiple of 4 ranks"),
        (12, "data.lanes=8 does not divide over 3 groups of 4 ranks; use a multiple of 3 lanes"),
        (64, r"over 16 groups of 4 ranks; .*, or let ranks share lanes \(engine\.sequence_ranks\)"),
    ],
)
def test_worlds_without_whole_groups_or_lanes_for_each_are_refused(world: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        accumulation_steps(run_of(4), world)


@pytest.mark.parametrize(
    ("ranks", "shared", "groups"),
    [
        (range(8, 16), 1, 8),
        (range(8, 16), 4, 2),
        (range(8, 16), 16, 1),
        (range(8, 16), 3, 4),  # 6 to 8, 9 to 11, 12 to 14, 15 to 17
        (range(6), 4, 2),
    ],
)
def test_a_node_reads_the_lanes_of_each_group_that_has_a_rank_on_it(ranks, shared, groups):
    assert num_groups(ranks, shared) == groups


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_ranks_that_share_lanes_divide_what_one_holds_of_them(checkpointing: Any) -> None:
    model = {"dropout": 0.1, "num_heads": 8}
    settings = {"length": 256, "model": model, "activation_checkpointing": checkpointing}
    alone, shared = (
        {part.name: part.bytes for part in memory_parts(run_of(ranks, **settings), ranks)}
        for ranks in (1, 4)
    )
    assert shared["logits"] == alone["logits"] / 4
    # What is sent and received comes on top.
    assert alone["activations"] / 4 < shared["activations"] < alone["activations"] / 4 * 1.2
    # Besides old and new rows those being saved; documents are not divided.
    assert alone["recurrent memory"] * 3 / 8 < shared["recurrent memory"]
    assert shared["recurrent memory"] < alone["recurrent memory"] * 3 / 8 * 1.2
    each = (computed_flops_of_step(run_of(ranks, **settings), ranks) for ranks in (1, 4))
    assert next(each) == next(each)


def test_describe_says_who_shares_and_explains_the_letter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["describe", "configs/experiments/books-laptop.yaml", "model.vocab_size=1000"]
    assert main([*command, "--gpus-per-node=4", "engine.sequence_ranks=2", "--explain"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"every 2 ranks share \d+ lanes .* sends [\d.]+ MiB of activations", said)
    assert "engine.sequence_ranks, ranks that share lanes" in said
    assert "(A M d b + states) / s" in said
    assert main([*command, "--explain"]) == 0
    assert "share lanes" not in capsys.readouterr().out


def test_a_report_says_that_lanes_are_shared() -> None:
    assert "8 lanes in segments of 16; ZeRO" in setup_of(run_of(1))
    assert "8 lanes in segments of 16, shared by 2 ranks each; ZeRO" in setup_of(run_of(2))
