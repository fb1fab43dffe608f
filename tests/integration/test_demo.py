"""The demo on a folder of text, stopped once and then finished; commands that its report names."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.status.run_state import read_state
from pretrain.cli import main
from pretrain.demo import texts
from pretrain.processes.local_ranks import RankGroup
from pretrain.reporting.run_history import read_history

pytestmark = pytest.mark.slow
STEPS = 24
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def demo(folder: Path, *options: str) -> list[str]:
    where = ["--corpus", str(folder / "corpus"), "--run-dir", str(folder / "demo")]
    return [sys.executable, "-m", "pretrain", "demo", *where, "--steps", str(STEPS), *options]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


def wait_until_training(directory: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and process.poll() is None:
        if (directory / "uninterrupted" / "metrics.jsonl").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"no training started: {process.communicate()}")


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> tuple[Path, str, str]:
    """The demo's directory, what the stopped start said and what the second one said."""
    folder: Path = tmp_path_factory.mktemp("story")
    (folder / "corpus").mkdir()
    size = 0
    for number, (_, text) in enumerate(texts.standard_library()):
        (folder / "corpus" / f"{number:04}.txt").write_text(text, encoding="utf-8")
        size += len(text)
        if size > 1.2 * texts.MIN_BYTES:
            break
    stopped = subprocess.Popen(
        demo(folder),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A suite started in the background ignores SIGINT, and so would all it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until_training(folder / "demo", stopped)
    stopped.send_signal(signal.SIGINT)
    said_first = stopped.communicate()[0]
    assert stopped.returncode == 130, said_first
    status = read_state(folder / "demo" / "uninterrupted")
    assert (status.state, status.is_lost) == ("stopped", False), status
    assert status.reason.startswith("stopped by Ctrl-C; ")
    second = run(demo(folder))
    assert second.returncode == 0, second.stdout + second.stderr
    return folder / "demo", said_first, second.stdout


def starts_and_ends(run: Path) -> list[str]:
    """The events of a run, except for those that a busy machine brings."""
    events = [json.loads(line)["event"] for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [event for event in events if event not in ("straggler", "stalled")]


def test_a_stopped_demo_says_how_to_resume_and_then_does(story):
    _, said_first, said = story
    assert "run the same command to resume" in said_first
    assert "Traceback" not in said_first
    assert "is already built from this text" in said, "shards were finished"
    numbers = [int(number) for number in re.findall(r"^(\d)/7 ", said, re.MULTILINE)]
    assert numbers == list(range(1, 8))


def test_the_killed_run_lost_steps_and_repeated_them_bit_for_bit(story):
    directory, _, said = story
    killed_after, checkpoint, lost = map(int, re.findall(r"\b\d+", line_with("killed after", said)))
    assert 0 < checkpoint < killed_after < STEPS
    assert lost == killed_after - checkpoint
    _, losses = json.loads((directory / "before-the-kill.json").read_text())
    assert list(map(int, losses)) == list(range(1, killed_after + 1))
    bits = re.findall(rf"^ *{killed_after} .* (0x\S+) +(0x\S+) +(0x\S+)", said, re.MULTILINE)
    assert [len(set(found)) for found in bits] == [1], said
    assert f"all {STEPS} losses and the final state are equal, bit for bit" in said
    assert starts_and_ends(directory / "killed") == ["started", "resumed", "finished"]


def line_with(words: str, said: str) -> str:
    return next(line for line in said.splitlines() if words in line)


def test_the_uninterrupted_run_was_started_once(story):
    events = starts_and_ends(story[0] / "uninterrupted")
    assert events == ["started", "finished"], "the start that Ctrl-C ended must not count"


def test_the_demo_names_one_train_and_one_validation_loss(story):
    """Progress, summaries, table and end; a newcomer saw three final losses."""
    directory, _, said = story
    results = read_history(directory / "killed").results
    logs = sorted((directory / "killed" / "logs").glob("attempt-*/rank-*.log"))
    progress = "".join(log.read_text() for log in logs)
    for name, loss in (("train", results.train_loss), ("validation", results.validation_loss)):
        pattern = rf"{name} loss (\d\.\d{{4}})"
        assert re.findall(pattern, progress)[-1] == f"{loss:.4f}"
        assert set(re.findall(pattern, said)) == {f"{loss:.4f}"}, "summaries, and the end"
    rows = re.findall(r"^ *(0|64|128|256) +(\d\.\d{4}) ", said, re.MULTILINE)
    assert [length for length, _ in rows] == ["0", "64", "128", "256"]
    assert dict(rows)["64"] == f"{results.validation_loss:.4f}"
    assert len({loss for _, loss in rows}) == 4


def test_the_report_is_one_file_that_names_no_machine(story):
    directory, _, said = story
    report = (directory / "report.html").read_text()
    assert str(directory / "report.html") in said
    assert "<svg" in report
    assert socket.gethostname() not in report
    assert not re.search(r'(src|href)="(?!#)', report)


def test_a_finished_demo_trains_nothing_again(story):
    directory = story[0]
    again = run(demo(directory.parent))
    assert again.returncode == 0
    assert again.stdout.split("Results")[1] == story[2].split("Results")[1]
    assert starts_and_ends(directory / "killed") == ["started", "resumed", "finished"]


def test_evaluation_gives_the_same_answer_on_one_rank_and_on_two(story, tmp_path):
    directory = story[0]
    command = [sys.executable, "-m", "pretrain", "evaluate", str(directory / "killed"), "--json"]
    command += ["--memory-length", "0", "64", "--max-tokens", "4000", "--lanes", "7"]
    single = run(command)
    assert single.returncode == 0, single.stderr
    with RankGroup(command, 2, tmp_path / "logs", environment=ENVIRONMENT) as group:
        assert group.wait() == [0, 0]
    printed = [line for line in group.logs[0].read_text().splitlines() if line.startswith("{")]
    pairs = zip(
        json.loads(single.stdout)["results"], json.loads(printed[-1])["results"], strict=True
    )
    for one, two in pairs:
        assert two.pop("seconds") > 0
        # Not bitwise: CPUs may round a row of a matrix product by the number of rows.
        assert two == {key: pytest.approx(one[key], rel=1e-5) for key in two}


def test_sampling_repeats_itself_with_the_same_seed_and_only_then(story, capsys):
    def sampled(*options: str) -> str:
        prompt = ["--prompt", "def ", "--tokens", "40"]
        assert main(["generate", str(story[0] / "killed"), *prompt, *options]) == 0
        return capsys.readouterr().out

    first, again, other = sampled(), sampled(), sampled("--seed", "2")
    assert first.startswith("def ")
    assert first == again != other
    assert sampled("--samples", "2").count("==== sample") == 2


def test_a_small_corpus_and_a_missing_one_take_one_clear_line(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "note.txt").write_text("too little\n")
    for options in ([], ["--corpus", str(tmp_path / "nowhere")]):
        result = run(demo(tmp_path, *options))
        assert result.returncode == 2
        assert "has 0.00 MB, expected a folder with 2 MB of text" in result.stderr
        assert len(result.stderr.splitlines()) == 1
