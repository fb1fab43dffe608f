"""A run that resumes with other world sizes and ZeRO stages, again and again."""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretrain.checkpoint import directory as files
from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.load import FragmentReader, load_memory
from pretrain.rundir.compare_runs import STATE_TOLERANCE, differing_progress, differing_values
from tests.helpers.engine_cells import engine_settings, findings_of, read_result, saved, train_cells

LANES = range(8)
# (ranks, ZeRO stage, last step)
CHAIN = ((2, 1, 4), (4, 3, 7), (1, 0, 10), (2, 2, 13))
END = CHAIN[-1][-1]
COMPRESSED = 8  # steps, of which most compress rows
# What no other test has: the two buckets in turn of a GPU, into which most parameters do not fit.
OPTIONS = {(2, 2): {"zero": {"overlap_comm": True, "reduce_bucket_size": 1000}}}


def chain_cells() -> list[dict[str, Any]]:
    """The run in one go, then the chain; each link saves what it loaded before its first step."""
    cells = [cell("whole", 2, 1, until=END, save_at=[END])]
    begin = 0
    for ranks, stage, end in CHAIN:
        link = cell(f"{ranks}-ranks-zero-{stage}", ranks, stage, until=end, save_at=[end])
        link["engine"] |= OPTIONS.get((ranks, stage), {})
        if begin:
            link |= {"resume": cells[-1]["name"], "save_at": [begin, end]}
        link["evaluate_at"] = link["save_at"]
        cells.append(link)
        begin = end
    # After its saves. Rank 1 verifies the second rank's files.
    cells[-1]["drift"] = [1, "layers.1.attention.output_weight"]
    cells[-1]["damage"] = f"step-{END:08d}/rank-00001.safetensors"
    return cells


def compressed_cells() -> list[dict[str, Any]]:
    """Compressed rows of isolated documents with lanes grouped in two ways."""
    cells = []
    for ranks, lanes in ((1, 8), (4, 1)):
        link = cell(f"compressed-{ranks}", ranks, 1, until=COMPRESSED, save_at=[COMPRESSED])
        link["engine"]["micro_batch_lanes"] = lanes
        memory = {"memory_length": 12, "compressed_length": 4, "compression_rate": 4}
        link["model"] = {"num_layers": 2, "isolate_documents": True, **memory}
        link["optim"] = {"name": "adamw"}
        cells.append(link)
    return cells


def drift_cell() -> dict[str, Any]:
    """Four ranks that hold everything whole; one differs in a bit of the EMA before the save."""
    engine = {"kind": "torch", "zero_stage": 0, "precision": "bf16"}
    more = {"until": 1, "save_at": [], "optim": {"ema_decay": 0.9}, "pickle_of_rank": 1}
    more["drift"] = [2, "layers.0.feed_forward.inner_weight (ema)"]
    return {"name": "drift", "ranks": 4, "engine": engine, **more}


def cell(name: str, ranks: int, stage: int, **more: Any) -> dict[str, Any]:
    engine = engine_settings(stage, "fp32")
    # All that a lane can carry, but for compressed rows: a state, rows, as many as each layer
    # needs, and memory tokens, which segments of a step teach each other to write. With Muon.
    model = {
        "num_layers": 3, "layer_kinds": ("deltanet", "attention", "attention"),
        "memory_length": (12, 12, 5), "memory_tokens": 2, "attention_sinks": True,
        "softmax_scaling": "log_length", "isolate_documents": True, "base_width": 16,
    }  # fmt: skip
    optim = {"name": "muon", "ema_decay": 0.9, "gradient_segments": 2}
    return {"name": name, "ranks": ranks, "engine": engine, "optim": optim, "model": model, **more}


@pytest.fixture(scope="module")
def output(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("elastic")
    train_cells(tiny_corpus, output, [*chain_cells(), *compressed_cells(), drift_cell()])
    return output


def steps_of(output: Path, cell: dict[str, Any], kind: str) -> dict[int, float]:
    return read_result(output / f"{cell['name']}.json")[kind]


@pytest.mark.slow
def test_a_chain_of_world_sizes_and_stages_keeps_the_losses(output: Path) -> None:
    whole, *links = chain_cells()
    expected = steps_of(output, whole, "losses")
    losses = {}
    for link in links:
        losses |= steps_of(output, link, "losses")
    assert losses.keys() == expected.keys() == set(range(1, END + 1))
    assert max(abs(losses[step] - expected[step]) for step in expected) < 1e-5


@pytest.mark.slow
def test_what_compresses_learns_the_same_for_any_grouping_of_lanes(output: Path) -> None:
    whole, parts = (saved(output, each["name"], COMPRESSED) for each in compressed_cells())
    with FragmentReader(whole) as ours, FragmentReader(parts) as theirs:
        names = {name for name, _ in ours.pieces() if "compressions" in name}
        assert len(names) == 4
        for name in names:
            # Adam divides the gradient by its own size: its first moment shows a wrong scale.
            found, expected = (each.whole(name, "exp_avg") for each in (theirs, ours))
            largest = expected.abs().max()
            assert largest > 0
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * largest)


@pytest.mark.slow
def test_each_link_of_the_chain_loads_every_bit(output: Path) -> None:
    """Before its first step it saved what it had loaded: sharded over other files, but equal."""
    links = chain_cells()[1:]
    for pair, (_, _, step) in zip(itertools.pairwise(links), CHAIN, strict=False):
        left, right = (saved(output, each["name"], step) for each in pair)
        assert left.index["world_size"] != right.index["world_size"]
        assert not differing_progress(left, right)
        memory, again = load_memory(left, LANES), load_memory(right, LANES)
        assert memory.keys() == again.keys()
        assert all(torch.equal(memory[name], again[name]) for name in memory)
        with FragmentReader(left) as ours, FragmentReader(right) as theirs:
            assert ours.pieces() == theirs.pieces()
            kinds = {kind for _, kind in ours.pieces()}
            assert kinds == {"weight", "momentum", "exp_avg", "exp_avg_sq", "ema"}
            for parameter, kind in ours.pieces():
                assert torch.equal(ours.whole(parameter, kind), theirs.whole(parameter, kind))


@pytest.mark.slow
def test_a_rank_whose_replica_drifts_is_named_before_anything_is_written(output: Path) -> None:
    what = drift_cell()["drift"][1]
    error = findings_of(output, "drift")["refused"]["error"]
    assert re.search(rf"step 1 .* rank 2 .*{re.escape(what)}", error)
    assert not (output / "drift").exists()


@pytest.mark.slow
def test_what_another_rank_sends_is_read_as_json_and_never_unpickled(output: Path) -> None:
    refused = findings_of(output, "drift")["pickle"]
    assert refused["error"].startswith("rank 1 ")
    assert [path.name for path in output.glob("executed-*")] in ([], ["executed-1"])


@pytest.mark.slow
def test_drift_of_the_weights_that_zero_gathers_is_noticed(output: Path) -> None:
    """Of two ranks, nobody can tell which is right."""
    link = chain_cells()[-1]
    error = findings_of(output, link["name"])["refused"]["error"]
    assert re.search(rf"step {END} .* ranks 0, 1 .*{link['drift'][1]}", error)
    saved = [entry.name for entry in (output / link["name"]).iterdir()]
    assert sorted(saved) == [files.step_directory(output, step).name for step in link["save_at"]]


@pytest.mark.slow
def test_an_evaluation_has_the_same_loss_at_every_world_size_and_stage(output: Path) -> None:
    """Three lanes on two, four, one and two ranks; the last of four has none."""
    links = [steps_of(output, link, "validation") for link in chain_cells()[1:]]
    for before, after in itertools.pairwise(links):
        (step,) = before.keys() & after.keys()
        # Not bitwise: CPUs may round a lane by its place in the batch.
        assert after[step] == pytest.approx(before[step], rel=1e-6)


@pytest.mark.slow
def test_all_ranks_refuse_a_checkpoint_of_which_one_found_a_damaged_file(output: Path) -> None:
    link = chain_cells()[-1]
    found = findings_of(output, link["name"])["resume_points"]
    before, end = link["save_at"]
    assert (found["damaged"], found["damaged, progress"]) == ([before, before], before)
    assert (found["repaired"], found["repaired, progress"]) == ([end, end], end)


def ends(output: Path) -> tuple[Checkpoint, Checkpoint]:
    """The last checkpoints of the run in one go and of the chain."""
    first, *_, last = chain_cells()
    return saved(output, first["name"], END), saved(output, last["name"], END)


@pytest.mark.slow
def test_the_chain_ends_with_the_state_of_the_run_in_one_go_to_rounding(output: Path) -> None:
    assert not differing_values(*ends(output), STATE_TOLERANCE)
    assert differing_values(*ends(output), 1e-12), "the chain rounds in another order"


CHANGED = {
    "weight": ("rank-00001", "|weight", " (weight): "),
    "momentum": ("rank-00001", "|momentum", " (momentum): "),
    "first moment": ("rank-00001", "|exp_avg", " (exp_avg): "),
    "second moment": ("rank-00000", "|exp_avg_sq", " (exp_avg_sq): "),
    "average": ("rank-00000", "|ema", " (ema): "),
    "memory": ("rank-00001", "memory.layers.1.hidden", "layers.1.hidden: "),
    "documents of the memory": ("rank-00000", "memory.documents", "documents: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGED)
def test_a_difference_of_state_beyond_rounding_is_named(output: Path, tmp_path: Path, what: str):
    file, suffix, expected = CHANGED[what]
    left, right = ends(output)
    changed = Path(shutil.copytree(right.directory, tmp_path / "changed"))
    tensors = load_file(changed / f"{file}.safetensors")
    name = max(name for name in tensors if name.endswith(suffix))
    tensors[name][-1] += 1
    save_file(tensors, changed / f"{file}.safetensors")
    problems = differing_values(left, Checkpoint(changed, right.index), STATE_TOLERANCE)
    assert len(problems) == 1
    assert expected in problems[0]
