"""`examples/demo.sh` with fewer steps, and commands on the run that it leaves."""

import json
import os
import re
import socket
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.texts import standard_library, write_jsonl
from pretrain.cli import main
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkout import ROOT
from tests.helpers.forked_ranks import ForkedRanks

pytestmark = pytest.mark.slow
# Every process writes on stderr what it imports.
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPROFILEIMPORTTIME": "1"
}  # fmt: skip
SHORTER = {
    "--steps 480 --kill-at 300": "--steps 8 --kill-at 6",
    "vocab_size=4096": "vocab_size=1000",
    "max_tokens=100000": "max_tokens=2000",
    "--max-tokens 100k": "--max-tokens 2000",
    "--tokens 260": "--tokens 20",
}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> tuple[Path, str]:
    """The demo's directory and what its script printed."""
    folder: Path = tmp_path_factory.mktemp("story") / "demo"
    write_jsonl(folder / "text.jsonl", islice(standard_library(), 400))
    script = (ROOT / "examples" / "demo.sh").read_text()
    for whole, short in SHORTER.items():
        assert whole in script
        script = script.replace(whole, short)
    programs = f"PATH={Path(sys.executable).parent}:$PATH; DEMO={folder}"
    done = run(["bash", "-e", "-c", f"{programs}\n{script}"])
    assert done.returncode == 0, done.stdout + done.stderr
    warned = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" in line]
    assert not [line for line in warned if "straggler" not in line], "a busy machine has some"
    return folder, done.stdout


def test_the_killed_run_repeated_its_lost_step_bit_for_bit(story):
    directory, printed = story
    assert re.search(r"checkpoint \S+ step 5\b", printed)
    assert "identical: 8 losses" in printed
    for name, starts in (("uninterrupted", 1), ("killed", 2)):
        ledger = (directory / name / "ledger.jsonl").read_text().splitlines()
        assert [json.loads(line)["event"] for line in ledger].count("training_began") == starts


def test_ranks_that_compile_nothing_do_not_import_the_compiler(story):
    """It would be half of a rank's start."""
    (log,) = (story[0] / "uninterrupted" / "logs").glob("*/rank-0.log")
    imported = log.read_text()
    assert "deepspeed.runtime.zero.stage_1_and_2" in imported
    assert "torch._dynamo" not in imported


def test_the_loss_is_the_same_number_in_training_report_and_evaluation(story):
    directory, printed = story
    lines = RunDir(directory / "killed").read_metrics()
    loss = f"{[line for line in lines if line['kind'] == 'evaluation'][-1]['loss']:.4f}"
    assert f"validation loss {loss}" in printed
    rows = dict(re.findall(r"^ *(0|64|128|256) .*?(\d\.\d{4})", printed, re.MULTILINE))
    assert list(rows) == ["0", "64", "128", "256"]
    assert rows["64"] == loss


def test_the_report_is_one_file_that_names_no_machine(story):
    report = (story[0] / "report.html").read_text()
    assert "<svg" in report
    assert socket.gethostname() not in report
    assert not re.search(r'(src|href)="(?!#)', report)


def test_evaluation_gives_the_same_answer_on_one_rank_and_on_two(story, tmp_path, capsys):
    arguments = ["evaluate", str(story[0] / "killed"), "--json"]
    arguments += ["--memory-length", "0", "64", "--max-tokens", "2000", "--lanes", "7"]
    assert main(arguments) == 0
    single = json.loads(capsys.readouterr().out)["results"]
    assert ForkedRanks(2, partial(main, arguments), tmp_path).wait() == [0, 0]
    log = (tmp_path / "rank-0.log").read_text()
    printed = [line for line in log.splitlines() if line.startswith("{")]
    for one, two in zip(single, json.loads(printed[-1])["results"], strict=True):
        assert two.pop("seconds") > 0
        # Not bitwise: CPUs may round a row of a matrix product by the number of rows.
        parts = zip(two.pop("parts"), one.pop("parts"), strict=True)
        assert all(pair[0] == pytest.approx(pair[1], rel=1e-5) for pair in parts)
        assert two == {key: pytest.approx(one[key], rel=1e-5) for key in two}


def test_the_seed_decides_what_is_sampled(story, capsys):
    sampled = []
    for seed in ("1", "1", "2"):
        arguments = ["--prompt", "def ", "--tokens", "20", "--samples", "2", "--seed", seed]
        assert main(["generate", str(story[0] / "killed"), *arguments]) == 0
        sampled.append(capsys.readouterr().out)
    first, again, other = sampled
    assert first.count("==== sample") == first.count("def ") == 2
    assert first == again != other


def test_escape_sequences_are_text_on_a_terminal_and_stay_as_they_are_in_a_file(
    story, capsys, monkeypatch
):
    options = ["--prompt", "p\x07", "--tokens", "200", "--temperature", "100", "--seed", "1"]
    printed = []
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda found=is_terminal: found)
        assert main(["generate", str(story[0] / "killed"), *options]) == 0
        printed.append(re.sub(r"\s", "", capsys.readouterr().out))
    shown, written = printed
    assert shown.startswith("p\\x07")
    assert shown.isprintable()
    assert written.startswith("p\x07")
    assert not written[2:].isprintable()
