"""Parameters and FLOPs against published numbers, the built model, and PyTorch's own counter."""

import csv
import math
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from foundation.settings import load_config
from pretrain.cli import main
from pretrain.config.cluster import ClusterConfig
from pretrain.config.run import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    PhaseConfig,
    RunConfig,
)
from pretrain.costs.device_memory import Footprint, checkpoint_bytes, largest_parameter, layer_bytes
from pretrain.costs.flops import (
    computed_step_flops,
    flops_per_token,
    parameter_counts,
    run_cost,
    tail_shares,
    token_flops,
)
from pretrain.costs.hardware import Hardware
from pretrain.costs.run_time import SLOWER_WHILE_WRITING, FailureCosts, failure_costs
from pretrain.mixers.check import flop_counter
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.choices import MODEL_CHOICES
from tests.helpers.models import TINY, VARIANTS
from tests.helpers.scaling import PUBLISHED_DATA

MODELS = Path(__file__).parents[4] / "configs" / "models"
# Counted from the published code; the shapes of its scripts.
PUBLISHED = {
    "enwik8-base": 41_055_436,
    "enwik8-large": 277_231_820,
    "text8-base": 40_964_635,
    "text8-large": 277_050_395,
    "wt103-base": 151_107_538,
    "wt103-large": 285_170_506,
    "lm1b-base": 357_812_082,
    "lm1b-large": 841_295_982,
}
LADDER = {"10m": 10e6, "30m": 30e6, "100m": 100e6, "300m": 300e6, "1b": 1e9, "3b": 3e9, "7b": 7e9}
SMALL = {"vocab_size": 60, "num_layers": 3, "d_model": 16, "num_heads": 2, "memory_length": 8}


def comments_of(path: Path) -> str:
    """The file's comments as one line."""
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configurations_have_their_published_sizes(name):
    model = load_config(RunConfig, MODELS / f"{name}.yaml").model
    assert parameter_counts(model).total == PUBLISHED[name]


COUNT = re.compile(r"([\d,]+) parameters")
FILES = sorted(MODELS.parent.glob("[em]*/*.yaml"))
STATED = [path for path in FILES if COUNT.search(comments_of(path))]


@pytest.mark.parametrize("path", STATED, ids=lambda path: path.name)
def test_a_configuration_has_the_parameters_that_its_comment_states(path):
    parameters = parameter_counts(load_config(RunConfig, path).model).total
    assert COUNT.findall(comments_of(path)) == [f"{parameters:,}"]


@pytest.mark.parametrize("rung", LADDER)
def test_each_rung_of_the_ladder_has_the_size_of_its_name_and_sees_20_tokens_per_parameter(rung):
    path = MODELS / f"xl_modern_{rung}.yaml"
    run = load_config(RunConfig, path)
    parameters = parameter_counts(run.model).total
    assert path in STATED
    assert f"{run.tokens_per_step:,} tokens a step" in comments_of(path)
    assert parameters == pytest.approx(LADDER[rung], rel=0.03)
    assert run_cost(run).tokens == pytest.approx(20 * parameters, rel=0.02)


def test_a_run_costs_what_its_phases_cost_together():
    model = ModelConfig(vocab_size=50, num_layers=2, d_model=16, num_heads=2, memory_length=8)
    data = DataConfig(lanes=2, segment_length=8)
    longer = replace(data, segment_length=16)
    phase = PhaseConfig(from_step=10, segment_length=16)
    run = RunConfig(model=model, data=replace(data, phases=(phase,)), optim=OptimConfig(steps=15))
    first, second = (
        run_cost(RunConfig(model=model, data=each, optim=OptimConfig(steps=steps)))
        for each, steps in ((data, 10), (longer, 5))
    )
    assert run_cost(run).tokens == first.tokens + second.tokens == 10 * 16 + 5 * 32
    assert run_cost(run).flops == first.flops + second.flops
    assert run_cost(run, 10).flops == first.flops


def test_counted_parameters_are_those_of_the_built_model():
    for options in (*VARIANTS.values(), *({name: value} for name, value in MODEL_CHOICES)):
        model = replace(TINY, **options)
        with torch.device("meta"):
            built = [parameter.numel() for parameter in TransformerXL(model).parameters()]
        assert parameter_counts(model).total == sum(built), options
        assert largest_parameter(model) == max(built), options


def counted_flops(module: TransformerXL, segments: int = 1) -> tuple[float, float]:
    """PyTorch's count of a forward pass, and of both, of three lanes with a full memory."""
    tokens_BL, memory = torch.arange(18).view(3, 6), None
    with torch.no_grad():
        for _ in range(5):
            _, memory = module(tokens_BL, tokens_BL, memory)
    tokens_BL = tokens_BL.repeat(1, segments)
    with flop_counter() as counter:
        nll_BL, _ = module(tokens_BL, tokens_BL, memory, num_segments=segments)
        forward = counter.get_total_flops()
        nll_BL.mean().backward()
        return forward, counter.get_total_flops()


KINDS = ("deltanet", "attention", "attention")
COMPRESSIVE = {"memory_length": 9, "compressed_length": 4}


@pytest.mark.parametrize(
    ("options", "ends"),
    list(zip([
        {},
        {"untie_biases": True, "d_head": 12},
        {"d_embed": 8},
        *({name: value} for name, value in MODEL_CHOICES),
        {"num_key_heads": 1, "feed_forward": "swiglu"},
        {"positions": "rope", "num_key_heads": 1},
        {"positions": "t5", "feed_forward": "gelu"},
        {"layer_kinds": KINDS, "query_key_norm": True},
        {"layer_kinds": ("deltanet",), "isolate_documents": True},
        {"memory_length": (4, 9, 0)},
        {"memory_length": (4, 0, 9), "layer_kinds": ("attention", "deltanet", "attention")},
        COMPRESSIVE,
        {**COMPRESSIVE, "memory_tokens": 2},
        {"memory_tokens": 3, "layer_kinds": KINDS},
        {**COMPRESSIVE, "positions": "alibi", "num_key_heads": 1},
    ], cycle([("post", 3), ("pre", 1)]))),
    ids=str,
)  # fmt: skip
def test_flops_are_what_pytorch_counts(options, ends):
    norm_position, segments = ends
    model = ModelConfig(**{**SMALL, "norm_position": norm_position, **options})
    forward, both = counted_flops(TransformerXL(model, attention_kernel="plain"), segments)
    # The shift's padding column is a product the formula leaves out.
    width = model.num_heads * model.head_width * (model.positions == "relative")
    padding = 2 * model.num_layers_with_rows * width * model.read_tokens(6) / 6
    expected, tokens = token_flops(model, 6, 3, segments), 18 * segments
    assert forward / tokens == pytest.approx(expected.forward + padding, rel=1e-12)
    assert both / tokens == pytest.approx(expected.training + 3 * padding, rel=1e-12)


def bytes_for_backward(model: ModelConfig, lanes: int, length: int) -> int:
    """What autograd keeps of a forward pass, besides weights."""
    module, kept = TransformerXL(model, attention_kernel="plain"), {}
    weights = {each.untyped_storage().data_ptr() for each in module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # so that no other gets its address
        return tensor

    tokens_BT = torch.zeros(lanes, length + 1, dtype=torch.int64)
    starts_BL = torch.zeros(lanes, length, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(tokens_BT[:, :-1], tokens_BT[:, 1:], None, starts_BL)
    return sum(kept[each].untyped_storage().nbytes() for each in kept.keys() - weights)


@pytest.mark.parametrize("isolates", [False, True])
@pytest.mark.parametrize(("lanes", "length"), [(2, 64), (3, 128)])
def test_a_deltanet_keeps_what_autograd_does_but_for_small_tensors(isolates, lanes, length):
    small = {**SMALL, "d_model": 32, "memory_length": 0, "isolate_documents": isolates}
    models = [
        ModelConfig(**{**small, "layer_kinds": ("deltanet",), "num_layers": layers})
        for layers in (2, 3)
    ]
    two, three = (bytes_for_backward(model, lanes, length) for model in models)
    run = RunConfig(model=models[0], engine=EngineConfig(kind="torch", precision="fp32"))
    run = replace(run, data=DataConfig(lanes=lanes, segment_length=length))
    kept = layer_bytes(run, lanes, on_gpu=False, kind="deltanet", memory=0).kept
    assert 1.0 <= (three - two) / kept < 1.07


@pytest.mark.parametrize(("segments", "of_weights"), [(1, 0), (2, 2)])
def test_stage_3_sums_a_ranks_part_of_the_gradients_in_float32(segments, of_weights):
    optim, engine = OptimConfig(gradient_segments=segments), EngineConfig(precision="bf16")
    run = RunConfig(model=ModelConfig(**SMALL), optim=optim, engine=replace(engine, zero_stage=3))
    parameters = parameter_counts(run.model).total
    gradients = Footprint(replace(run, data=DataConfig(lanes=8)), 8).parts["gradients"]
    assert gradients == 4 * parameters / 8 + of_weights * parameters


@pytest.mark.parametrize(
    ("norm_position", "kinds", "engine"),
    [
        ("post", (), {"activation_checkpointing": "full"}),
        ("pre", ("deltanet",), {"activation_checkpointing": "full"}),
        ("pre", (), {"activation_checkpointing": "selective"}),
        ("post", ("deltanet",), {"activation_checkpointing": "selective"}),
        ("post", ("mamba2",), {"activation_checkpointing": "selective"}),
        ("pre", ("mamba2",), {"activation_checkpointing": "segments"}),
        ("post", (), {"activation_checkpointing": "segments"}),
        ("post", (), {"logits_chunk_tokens": 9}),
    ],
    ids=str,
)
def test_flops_that_are_computed_twice_are_those_that_pytorch_counts(norm_position, engine, kinds):
    compresses = "logits_chunk_tokens" not in engine and not kinds
    compression = {"compressed_length": 4} if compresses else {"d_embed": 8}
    more = {"positions": "rope", "norm_position": norm_position, "layer_kinds": kinds}
    model = ModelConfig(**{**SMALL, "memory_length": 9, **compression, **more})
    data, counted = DataConfig(lanes=3, segment_length=6), []
    for settings in ({}, engine):
        plain = EngineConfig(attention_kernel="plain", **settings)
        run = RunConfig(model=model, data=data, engine=plain)
        kept = (plain.activation_checkpointing, "plain", plain.logits_chunk_tokens)
        _, found = counted_flops(TransformerXL(model, *kept))
        counted.append(computed_step_flops(run, 1))
        assert counted[-1] == pytest.approx(found, rel=1e-9)
        once = run.tokens_per_step * flops_per_token(run)
        assert once == counted[0], "MFU counts nothing twice"
    assert counted[1] > counted[0]


def test_the_fractions_of_an_adaptive_softmax_are_a_distribution_that_favors_the_front():
    shares = tail_shares(ModelConfig(vocab_size=267735, cutoffs=(20000, 40000, 200000)))
    assert sum(shares) == pytest.approx(1.0)
    assert shares[0] > 0.75


def test_all_50_architectures_of_hoffmanns_table_a9_match_within_0_7_per_cent():
    """Counted as a Transformer-XL, attention width heads * key size, 32,000 tied embeddings."""
    rows = list(csv.DictReader((PUBLISHED_DATA / "hoffmann_table_a9.csv").open()))
    assert len(rows) == 50
    for row in rows:
        columns = {"num_layers": "n_layers", "d_model": "d_model", "num_heads": "n_heads"}
        columns |= {"d_head": "kv_size", "d_inner": "ffw_size"}
        sizes = {name: int(row[column]) for name, column in columns.items()}
        published = 1e6 * float(row["million_parameters"])
        model = ModelConfig(vocab_size=32000, **sizes)
        assert parameter_counts(model).total == pytest.approx(published, rel=0.007)


CONFIGS = Path(__file__).parents[4] / "configs"
HOUR = FailureCosts(between_failures=3600.0, pause=30.0)
RUN = RunConfig(
    model=ModelConfig(vocab_size=1000, num_layers=4, d_model=64, num_heads=4, memory_length=32),
    data=DataConfig(lanes=16, segment_length=32),
)


def test_goodput_without_overlap_is_that_of_daly():
    costs = replace(HOUR, start=300.0)
    # Equation 13: wall time over solve time.
    mean, interval = 3600.0, 450.0
    wall = mean * math.exp(300 / mean) * (math.exp((interval + 30) / mean) - 1) / interval
    assert costs.goodput(interval) == pytest.approx(1 / wall, rel=1e-12)


@pytest.mark.parametrize("pause", [1.0, 100.0, 1700.0, 1900.0, 3600.0, 7000.0, 7300.0, 1e5])
@pytest.mark.parametrize("more", [{}, {"write": 100.0, "down": 200.0, "start": 300.0}], ids=str)
def test_the_best_interval_loses_no_goodput_however_long_a_pause_is(more, pause):
    costs = replace(HOUR, pause=pause, **more)
    best = max(costs.goodput(3.6 * part) for part in range(1, 1001))
    assert costs.goodput(costs.best_interval) >= 0.998 * best


def test_a_save_is_not_started_before_the_one_before_is_written():
    costs = replace(HOUR, pause=1.0, write=200.0)
    assert costs.best_interval == 200.0
    assert costs.goodput(100.0) < costs.goodput(200.0)


def test_costs_follow_from_the_cluster_and_the_size_of_a_checkpoint():
    node = ClusterConfig(ranks_per_node=2, mtbf_hours=1000.0, disk_mib_per_second=1.0)
    hardware = Hardware(nodes=4, ranks_per_node=2, name="cpu", node=node)
    transfer = checkpoint_bytes(RUN) / 4 / (1 << 20)
    blocking = replace(RUN, checkpoint=CheckpointConfig(asynchronous=False))
    expected = FailureCosts(between_failures=9e5, pause=transfer, down=600.0, start=transfer)
    assert failure_costs(blocking, hardware) == expected
    expected = replace(expected, pause=SLOWER_WHILE_WRITING * transfer, write=transfer)
    assert failure_costs(RUN, hardware) == expected


def described(capsys, tmp_path, *lines: str) -> str:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("\n".join(["gpus_per_node: h100:8", *lines]) + "\n")
    model = str(CONFIGS / "models" / "xl_modern_7b.yaml")
    place = ["--cluster", str(cluster), "--nodes", "64"]
    assert main(["describe", model, *place, "data.lanes=512"]) == 0
    return capsys.readouterr().out


def test_describe_prints_the_best_interval_of_a_cluster_whose_failures_are_known(capsys, tmp_path):
    assert "best interval" not in described(capsys, tmp_path)
    few = described(capsys, tmp_path, "mtbf_hours: 6300")
    assert "4.1 days" in few
    assert "checkpoint.interval=200" in few
    many = described(capsys, tmp_path, "mtbf_hours: 63")
    steps = [int(text.partition("best interval")[2].split()[0]) for text in (few, many)]
    assert steps[1] == pytest.approx(steps[0] / 10, rel=0.03)  # the root of a hundredth
