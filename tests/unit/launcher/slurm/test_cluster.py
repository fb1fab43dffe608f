import dataclasses
import shlex
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from launcher.slurm.client import Partition
from launcher.slurm.sbatch import Job, check_request, check_run, render, usable_nodes
from pretrain.config.cluster import (
    ClusterConfig,
    NodeRange,
    fixed_nodes,
    load_cluster,
    parse_nodes,
    time_limit_seconds,
)
from pretrain.config.run import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig
from tests.helpers.jobs import job_of

CLUSTERS = sorted((Path(__file__).parents[4] / "configs" / "clusters").glob("*.yaml"))
CPU = ClusterConfig(ranks_per_node=2)
TWO = NodeRange(2, 2)
GPU = ClusterConfig(gpus_per_node="8", gpu="A100", cpus_per_rank=4)


def run_config(lanes: int = 16, **settings) -> RunConfig:
    model = ModelConfig(num_layers=2, d_model=32, num_heads=2, vocab_size=100)
    data = DataConfig(lanes=lanes, segment_length=8)
    return RunConfig(**{"model": model, "data": data, **settings})


def job(cluster: ClusterConfig = CPU, nodes: NodeRange = TWO) -> Job:
    return job_of(Path("/shared/my runs/books"), cluster, nodes)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("1:30", 90), ("24:00:00", 86_400), ("2-00", 172_800), ("1-02:03", 93_780),
        ("1-02:03:04", 93_784), ("UNLIMITED", float("inf")),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_reads_them(text, seconds):
    assert time_limit_seconds(text) == seconds


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_the_example_clusters_are_valid(path):
    assert render(job(load_cluster(path)))


MISTAKES = {
    "partitoin": ["gpu"],
    "ranks_per_node": ["0"],
    "gpus_per_node": ["8\nranks_per_node: 4", "h100", "-1", "8x", "'h 100:1'",
                      "a100:1\ngpu: H100"],
    "gpu": ["H100"],
    "time_limit": ["soon", '"1:00"', "86400"],
    "environment": [f"{{'{name}': x}}" for name in ("A B", "1X", "A;id", "", "É")]
    + ["{HF_TOKEN: hf_123}", "{AWS_ACCESS_KEY_ID: hf_123}", "{aws_password: hf_123}",
       "{NOTE: 'env:two words'}", "{TOKEN: 'env:HOME'}\noptions: {export: NONE}"],
    "options": [f"{{'{name}': x}}" for name in ("-x", "a --b", "Mem", "", "m=3", "nodes", "wrap")]
    + [f"{{{name}: x}}" for name in ("gpus-per-node", "partition", "output", "array", "ntasks")]
    + ["{gpus: 16}", "{test-only: }", "{error: err.log}", "{time-min: '1:00'}",
       "{export: 'PATH,HOME'}"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in MISTAKES.items() for value in values]
)
def test_a_mistake_in_a_cluster_file_is_said_in_one_line(tmp_path, name, value):
    text = f"{name}: {value}"
    ranks = "" if "_per_node" in text else "ranks_per_node: 1\n"
    (tmp_path / "cluster.yaml").write_text(f"{ranks}{text}\n")
    with pytest.raises(ConfigError, match=name) as error:
        render(job(load_cluster(tmp_path / "cluster.yaml")))
    assert "\n" not in str(error.value)
    assert "hf_123" not in str(error.value), "a secret is not repeated"


def test_an_unknown_cluster_gets_the_files_that_there_are(tmp_path):
    (tmp_path / "my-site.yaml").touch()
    for path, named in (
        (Path("cpu"), "'configs/clusters/cpu.yaml'"),
        (tmp_path / "other.yaml", "8xh100.yaml"),
        (tmp_path / "my-site.yml", "/my-site.yaml'"),
    ):
        with pytest.raises(ConfigError, match=named):
            load_cluster(path)


def test_the_script_asks_for_what_the_cluster_file_says_and_hands_over_to_the_supervisor():
    cluster = dataclasses.replace(
        GPU,
        partition="gpu",
        options={"mem": "0", "exclusive": ""},
        setup=("module load cuda/13", "ulimit -l unlimited"),
        environment={"NCCL_DEBUG": "WARN", "NOTE": "two words"},
    )
    lines = render(job(cluster, NodeRange(4, 4))).splitlines()
    assert lines[0] == "#!/bin/bash"
    wanted = ["requeue", "partition=gpu", "nodes=4", "ntasks-per-node=8", "gpus-per-node=8"]
    wanted += ["cpus-per-task=4", "time=24:00:00", "signal=B:USR1@180", "open-mode=append"]
    wanted += ["mem=0", "exclusive"]
    assert {f"#SBATCH --{option}" for option in wanted} <= set(lines)
    assert not [line for line in lines if "account" in line or "qos" in line]
    assert lines.index("module load cuda/13") < lines.index("ulimit -l unlimited")
    assert 'export NOTE="two words"' in lines
    run_dir = "/shared/my runs/books"
    program = ["exec", "/bin/echo", f"{run_dir}/slurm/code", "launcher.slurm.batch_process"]
    assert shlex.split(lines[-1])[:5] == [*program, run_dir]


def test_a_range_of_nodes_asks_for_no_number_of_tasks():
    script = render(job(GPU, NodeRange(4, 16)))
    assert "#SBATCH --nodes=4-16\n" in script
    assert "#SBATCH --mincpus=32\n" in script
    assert "ntasks" not in script


def test_a_job_with_spare_nodes_asks_for_all_and_outlives_one():
    script = render(job(GPU, parse_nodes("2+1")))
    assert "#SBATCH --nodes=3\n" in script
    assert " --no-kill\n" in script
    assert script.endswith(" --spare-nodes=1\n")
    assert "spare" not in render(job(GPU, TWO))
    assert "no-kill" not in render(job(GPU, TWO))


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("4", NodeRange(4, 4)), ("4:16", NodeRange(4, 16)), ("4+2", NodeRange(4, 4, spare=2))],
)
def test_nodes_are_a_number_a_range_or_have_spare_ones(text, nodes):
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "4:2", "1:2:3", "two", "1:99999", "1:" + "9" * 5000, "\u0664", "1:"]
    + ["0+1", "2+0", "2+", "2+one", "2:3+1", "65536+1"],
)
def test_nodes_that_are_neither_are_refused(text):
    with pytest.raises(ConfigError, match="--nodes"):
        parse_nodes(text)


def test_costs_count_the_nodes_that_train_checks_all_of_one_number():
    found = [fixed_nodes(text) for text in ("4", "4:4", "4+2")]
    assert [(nodes.least, nodes.least_of_job) for nodes in found] == [(4, 4), (4, 4), (4, 6)]
    with pytest.raises(ConfigError, match="4 or 16"):
        fixed_nodes("4:16")


def test_a_run_that_fits_its_cluster_gets_no_words(tmp_path):
    assert check_run(run_config(), GPU, NodeRange(1, 2), tmp_path / "not" / "yet") == []


def test_of_nodes_that_do_not_divide_the_lanes_the_most_that_do_are_used(tmp_path):
    usable = [usable_nodes(run_config(16), 2, nodes) for nodes in (1, 2, 3, 4, 7, 8, 9)]
    assert usable == [1, 2, 2, 4, 4, 8, 8]
    assert usable_nodes(run_config(15), 2, 4) == 0
    (note,) = check_run(run_config(16), CPU, NodeRange(1, 3), tmp_path)
    assert "only 2 " in note


@pytest.mark.parametrize("mount", ["/a:/a", "/a:/b:ro", "a", "~/a", "/a,/b", ""])
def test_a_mount_that_is_not_one_directory_is_refused(mount):
    """A container's own syntax would be mounted at another path than the host's."""
    with pytest.raises(ConfigError, match=r"container_mounts: found .*; write it as /shared"):
        ClusterConfig(ranks_per_node=1, container_mounts=("/data", mount))


@pytest.mark.parametrize(
    "cluster", [GPU, ClusterConfig(gpus_per_node="nvidia_a100-sxm4-80gb:8", partition="a,b")]
)
def test_a_model_too_large_for_the_gpu_is_refused_with_a_way_out(tmp_path, cluster):
    model = ModelConfig(num_layers=24, d_model=2048, num_heads=16, vocab_size=32_000)
    config = run_config(model=model, data=DataConfig(lanes=16384, segment_length=512))
    way_out = r"engine\.offload_memories=true engine\.micro_batch_lanes="
    with pytest.raises(ConfigError, match=rf"A100 .* {way_out}"):
        check_run(config, cluster, NodeRange(1, 1), tmp_path)


def test_a_run_whose_kept_checkpoints_exceed_the_disk_is_refused(tmp_path):
    checkpoint = CheckpointConfig(keep_every=1)
    config = run_config(checkpoint=checkpoint, optim=OptimConfig(steps=10**12))
    with pytest.raises(ConfigError, match=r"1000000000004 checkpoints need .* keep fewer"):
        check_run(config, GPU, NodeRange(1, 2), tmp_path)
    (note,) = check_run(config, GPU, NodeRange(1, 2), tmp_path, is_dry_run=True)
    assert "1000000000004 " in note


MAIN = Partition(name="main", is_default=True, num_nodes=4, cpus_per_node=8, gpus_per_node=0,
                 time_limit="infinite")  # fmt: skip
SHORT = Partition(name="short", is_default=False, num_nodes=2, cpus_per_node=64, gpus_per_node=8,
                  time_limit="1:00:00")  # fmt: skip
PARTITIONS = [MAIN, SHORT]


@pytest.mark.parametrize(
    ("cluster", "nodes", "numbers"),
    [
        (dataclasses.replace(CPU, partition="nowhere"), 1, "'nowhere' .* main, short"),
        (CPU, 5, "5 nodes, .* 'main' has 4"),
        (dataclasses.replace(CPU, cpus_per_rank=5), 1, "10 CPUs .* 'main' has 8"),
        (GPU, 1, "32 CPUs |8 GPUs "),
        (dataclasses.replace(GPU, partition="short"), 1, "24:00:00 .* 1:00:00"),
        (dataclasses.replace(CPU, partition="main,short"), 5, "5 nodes, .* 'main' has 4"),
        (dataclasses.replace(CPU, partition="main,lost"), 2, "'lost'"),
    ],
)
def test_a_request_that_can_never_start_is_refused(cluster, nodes, numbers):
    with pytest.raises(ConfigError, match=numbers):
        check_request(cluster, NodeRange(nodes, nodes), PARTITIONS)

    # One of several has to fit: `short` has only two nodes.
    check_request(dataclasses.replace(CPU, partition="main,short"), NodeRange(4, 4), PARTITIONS)
