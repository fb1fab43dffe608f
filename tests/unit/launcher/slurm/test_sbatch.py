"""What a batch script makes of the values that go into it."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foundation.errors import ConfigError
from launcher.cli import main
from launcher.slurm.sbatch import Job, check_request, render, render_array
from pretrain.config.cluster import ClusterConfig, NodeRange, load_cluster
from tests.helpers.jobs import job_of

CPU = ClusterConfig(ranks_per_node=2)
# What bash, and sbatch in its #SBATCH lines, give a meaning to; and any other character.
TEXTS = st.text(
    st.one_of(
        st.sampled_from("\"'\\$`!#%*?~ ;&|<>(){}[]=-@:,"),
        st.characters(exclude_categories=("Cc", "Cs")),
    ),
    max_size=40,
)


def job(run_dir: Path, cluster: ClusterConfig = CPU, python: str = "/bin/echo") -> Job:
    return job_of(run_dir, cluster, python=python)


def run_script(script: str, python: Path, **variables: str) -> list[str]:
    """The arguments, one per line and then the environment, that the script's program was given."""
    python.write_text('#!/bin/sh\nfor a in "$@"; do printf "%s\\n" "$a"; done\n/usr/bin/env\n')
    python.chmod(0o755)
    return printed_by(script, **variables).split("\n")  # splitlines knows more ends of lines


def printed_by(script: str, **variables: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", **variables}
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr
    return os.fsdecode(result.stdout)


@settings(max_examples=60, deadline=None)
@given(value=TEXTS, directory=TEXTS.map(lambda text: text.replace("/", "").replace("\\", "")))
@example(value="\u2028", directory="\u2028")
def test_bash_hands_on_every_value_of_a_script_unchanged(tmp_path_factory, value, directory):
    folder = tmp_path_factory.mktemp("script")
    options = {"comment": value, "exclusive": None}
    cluster = replace(CPU, environment={"NOTE": value}, options=options)
    run_dir = Path("/runs") / f"x{directory}"
    script = render(job(run_dir, cluster, str(folder / "python")))
    lines = run_script(script, folder / "python")
    program = [str(run_dir / "slurm" / "code"), "launcher.slurm.batch_process"]
    assert lines[:3] == [*program, str(run_dir)]
    assert f"NOTE={value}" in lines
    array = render_array(job(run_dir, cluster, str(folder / "python")), [run_dir], at_a_time=None)
    array = array.replace("ln -sf", ": ln -sf")
    assert run_script(array, folder / "python", SLURM_ARRAY_TASK_ID="0")[2] == str(run_dir)
    assert sum(line.startswith("#SBATCH") for line in script.split("\n")) == 12


@pytest.mark.parametrize("text", ["two\nlines", "tab\there", "\x1b[31mred", "nul\0", "\x85"])
def test_control_characters_are_refused_in_every_value_of_a_script(tmp_path, text):
    with pytest.raises(ConfigError) as error:
        render(job(Path(f"/runs/{text}")))
    assert "\n" not in str(error.value)
    changes = {"partition": text, "container_image": text, "options": {"comment": text}}
    changes |= {"environment": {"NOTE": text}, "setup": ("true", text), "container_mounts": (text,)}
    for name, value in changes.items():
        with pytest.raises(ConfigError, match=name):
            replace(CPU, **{name: value})


@pytest.mark.parametrize(
    "name", ["../../x", "a b", "-x", ".x", "a\nb", "a%j", "ä", "x" * 101, "a/b"]
)
def test_a_name_that_could_leave_its_place_is_refused_in_one_line(tmp_path, capsys, name):
    (tmp_path / "x.yaml").write_text("model: {vocab_size: 300}\n")
    (tmp_path / "cluster.yaml").write_text("ranks_per_node: 1\n")
    command = ["submit", str(tmp_path / "x.yaml"), f"--cluster={tmp_path / 'cluster.yaml'}"]
    assert main([*command, "--dry-run", f"--name={name}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "name" in error


def test_percent_signs_of_a_directory_are_no_patterns_and_what_sbatch_cannot_take_is_refused():
    script = render(job(Path("/runs/50%j x")))
    assert '#SBATCH --output="/runs/50%%j x/logs/slurm-%j.log"\n' in script
    with pytest.raises(ConfigError, match="backslash"):
        render(job(Path("/runs/a\\b")))
    with pytest.raises(ConfigError, match="4,000"):
        render(job(Path("/runs") / ("x" * 4001)))


def test_flags_typed_gpus_and_several_partitions_are_written_as_slurm_wants_them(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("partition: main,urgent\ngpus_per_node: h100:4\noptions: {exclusive: , mem: 0}")
    cluster = load_cluster(file)
    lines = render(job(Path("/runs/x"), cluster)).splitlines()
    for option in ("partition=main,urgent", "gpus-per-node=h100:4", "exclusive", "mem=0"):
        assert f"#SBATCH --{option}" in lines
    assert (cluster.num_gpus, cluster.tasks_per_node, cluster.gpu_model) == (4, 4, "H100")


def test_a_job_is_asked_to_be_requeued_unless_the_cluster_file_forbids_it():
    for options, flags in (
        ({"export": "NONE"}, ["#SBATCH --requeue", "#SBATCH --export=NONE"]),
        ({"export": "ALL", "no-requeue": None}, ["#SBATCH --export=ALL", "#SBATCH --no-requeue"]),
    ):
        script = render(job(Path("/runs/x"), replace(CPU, options=options))).splitlines()
        assert [line for line in script if "requeue" in line or "--export" in line] == flags


def test_a_secret_is_taken_from_the_submitters_environment_and_not_written(tmp_path, monkeypatch):
    cluster = replace(CPU, environment={"WANDB_API_KEY": "env:MY_KEY"})
    script = render(job(Path("/runs/x"), cluster, str(tmp_path / "python")))
    lines = run_script(script, tmp_path / "python", MY_KEY="two 'words' $HOME")
    assert "WANDB_API_KEY=two 'words' $HOME" in lines
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="MY_KEY"):
        check_request(cluster, NodeRange(1, 1), [])
    monkeypatch.setenv("MY_KEY", "hidden")
    check_request(cluster, NodeRange(1, 1), [])
    assert "hidden" not in render(job(Path("/runs/x"), cluster))


JOB = job_of(Path("/runs/grid"), CPU, NodeRange(1, 1))


def test_a_task_of_an_array_runs_its_own_cell_which_has_a_link_to_its_log(tmp_path):
    runs = [tmp_path / "narrow", tmp_path / "with space"]
    script = render_array(JOB, runs, at_a_time=2)
    assert "#SBATCH --array=0-1%2\n" in script
    assert "#SBATCH --nodes=1\n" in script
    (runs[1] / "logs").mkdir(parents=True)
    printed = printed_by(script, SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="17")
    then = f"{runs[1]} --attempts-without-progress=3\n"
    assert printed == f"{JOB.code} launcher.slurm.batch_process {then}"
    log = Path("logs") / "slurm-17_1.log"
    assert (runs[1] / log).readlink() == JOB.run_dir / log


def test_arrays_that_share_a_limit_run_one_after_the_other():
    script = render_array(JOB, [Path("/runs/a"), Path("/runs/b")], at_a_time=1, after="17")
    assert " --dependency=afterany:17\n" in script
