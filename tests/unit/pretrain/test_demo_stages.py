from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError
from pretrain.demo.command import (
    read_results,
    refuse_other_directories,
    run_stages,
    start_from_scratch,
    write_results,
)
from pretrain.demo.stages import Demo, Stage, new_demo


@pytest.fixture
def demo(tmp_path) -> Demo:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "note.txt").write_text("text")
    return new(tmp_path)


def new(folder: Path, steps: int = 0) -> Demo:
    """The demo in `folder` as another start of the command sees it."""
    demo = new_demo(folder / "demo", folder / "corpus", steps)
    demo.directory.mkdir(exist_ok=True)
    return demo


def stages_that(done: list[str], stop_in: str = "") -> list[Stage]:
    """Stages that note their names in `done`; one of them is stopped by Ctrl-C."""

    def stage(name: str) -> Stage:
        def run(demo: Demo) -> dict:
            done.append(name)
            (demo.directory / name).mkdir()
            if name == stop_in:
                raise KeyboardInterrupt
            return {"summary": name}

        return name, f"Do {name}", run

    return [stage(name) for name in ("text", "data", "train")]


def test_a_stopped_demo_resumes_with_the_stage_in_which_it_was_stopped(demo, tmp_path, capsys):
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_stages(demo, stages_that(done, stop_in="data"))
    again = new(tmp_path)
    assert read_results(again)
    run_stages(again, stages_that(done))
    assert done == ["text", "data", "data", "train"]
    assert capsys.readouterr().out.count("kept from before") == 1


@pytest.mark.parametrize("change", ["text", "steps"])
def test_results_count_only_for_the_same_text_and_settings(demo, tmp_path, change):
    run_stages(demo, stages_that([]))
    assert read_results(new(tmp_path))
    if change == "text":
        (tmp_path / "corpus" / "more.txt").write_text("more")
    other = new(tmp_path, steps=32 if change == "steps" else 0)
    assert not read_results(other)
    start_from_scratch(other)
    assert [path.name for path in other.directory.iterdir()] == ["demo.json"]
    assert not read_results(demo), "the results were of other inputs"


def test_the_demos_own_files_are_no_inputs_even_if_its_directory_is_in_the_corpus(tmp_path):
    (tmp_path / "note.txt").write_text("text")
    (tmp_path / "demo").mkdir()
    before = new_demo(tmp_path / "demo", tmp_path, 0)
    assert before.inputs
    (tmp_path / "demo" / "report.html").write_text("a page")
    assert new_demo(tmp_path / "demo", tmp_path, 0).inputs == before.inputs


@pytest.mark.parametrize("contents", ["{", '{"results": {}}', "[]"])
def test_with_an_unreadable_file_of_results_every_stage_runs_again(demo, contents):
    (demo.directory / "demo.json").write_text(contents)
    assert not read_results(demo)
    write_results(demo)
    assert json.loads((demo.directory / "demo.json").read_text())["results"] == {}


def test_a_directory_of_something_else_is_rejected(tmp_path):
    (tmp_path / "precious").mkdir()
    refuse_other_directories(tmp_path / "precious")
    refuse_other_directories(tmp_path / "new")
    (tmp_path / "precious" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="has other files"):
        refuse_other_directories(tmp_path / "precious")
    with pytest.raises(ConfigError, match="is a file"):
        refuse_other_directories(tmp_path / "precious" / "thesis.txt")


def test_too_few_steps_to_kill_and_resume_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="--steps 8 is too short"):
        new_demo(tmp_path / "demo", None, 8)


@pytest.mark.parametrize("steps", [16, 24, 640, 1000])
def test_the_kill_comes_after_a_checkpoint_and_before_the_next(tmp_path, steps):
    demo = new_demo(tmp_path / "demo", None, steps)
    interval = demo.run.checkpoint.interval
    assert interval <= demo.kill_step < steps
    assert interval == 1 or demo.kill_step % interval
