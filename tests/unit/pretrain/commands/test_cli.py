import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main as launcher
from pretrain.cli import COMMANDS, main
from pretrain.cli import main as pretrain
from pretrain.config.run import ModelConfig, RunConfig
from pretrain.engines.engine import is_out_of_memory
from pretrain.rundir.exit_statuses import EXIT_SITE_FAILED
from pretrain.rundir.run_dir import RunDir
from pretrain.sweeps.cell_runs import find_runs, runs_of
from pretrain.terminal.text import counted, distinguished, fitted_table, si, step_time, text_table
from tests.helpers.checkout import ROOT

# Prints, of each command line, its exit status, its error, and whether torch was imported by then.
COMMAND_LINES = """
import contextlib, io, json, sys
from pretrain.cli import main
found = []
for line in json.load(sys.stdin):
    output = contextlib.redirect_stdout(io.StringIO())
    with output, contextlib.redirect_stderr(io.StringIO()) as error:
        found.append([main(line), error.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""
ACTIONS = {
    "checkpoint": ("list", "verify", "fetch"),
    "scale": ("plan", "collect", "fit", "report", "memory"),
}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_explains_itself_within_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    try:
        status = main([*filter(None, [command]), "--help"])
    except SystemExit as exited:  # argparse's way
        status = exited.code
    assert status == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: pretrain {command}")
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pretrain e", ["evaluate", "export"]),
        ("pretrain scale pl", ["plan"]),
        ("pretrain evaluate runs/x --pro", ["--probe"]),
        ("pretrain evaluate runs/x --probe needle c", ["copy"]),
        ("pretrain describe --gpu H", ["H100", "H200"]),
        ("pretrain describe exp", []),  # the shell knows files
        ("pretrain nothing ", []),
    ],
)
def test_shells_complete_commands_flags_and_choices(capsys, monkeypatch, line, expected):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["--complete", "pretrain", line.split()[-1]]) == 0
    assert capsys.readouterr().out.split() == expected


def test_json_has_what_the_text_of_describe_says(capsys):
    command = ["describe", str(ROOT / "configs" / "models" / "wt103-base.yaml")]
    assert main([*command, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    said = capsys.readouterr().out
    assert values["model"] in said.splitlines()
    assert f"{values['parameters']['total']:,}" in said
    assert f"{values['tokens_per_second']:,.0f} tokens/s" in said
    assert values["fits"]
    assert "NOT FIT" not in said


@pytest.mark.parametrize(
    ("word", "name"), [("muon", "optim.name"), ("hybrid", "model.layer_kinds")]
)
def test_a_setting_is_found_by_its_values_and_by_its_meaning(capsys, word, name):
    assert main(["settings", word]) == 0
    assert f"{name} = " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--promt=x", "'--prompt'"),
        ("--prompt-file=/", "--prompt-file / "),
        ("--prompt-file=/bin/sh", "--prompt-file /bin/sh "),
        ("optim.steps=9", "optim.steps=9"),
        ("--top-k", "--top-k"),
        ("--temperature=hot", "'hot'"),
    ],
)
def test_a_misspelt_flag_is_answered_in_one_line_with_the_nearest(capsys, flag, answer):
    assert main(["generate", "run", flag]) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert error.count("\n") == 1


def test_a_wrong_flag_is_answered_before_torch_is_imported():
    names = [f"{name} {x}".split() for name in COMMANDS for x in ACTIONS.get(name, ("",))]
    lines = [[*name, "x.yaml", "--wrong"] for name in names]
    described = ["describe", str(ROOT / "configs" / "models" / "wt103-base.yaml")]
    child = subprocess.run(
        [sys.executable, "-c", COMMAND_LINES], input=json.dumps([*lines, described]), text=True,
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    *refused, (status, _, has_torch) = json.loads(child.stdout)
    assert (status, has_torch) == (0, False), "describing needs none either"
    for line, (status, error, has_torch) in zip(lines, refused, strict=True):
        assert status == 2, line
        assert "--wrong" in error, line
        assert not has_torch, line


def test_a_misspelt_flag_is_named_also_where_it_should_have_been_a_required_one(capsys):
    assert main(["train", "x.yaml", "--rundir", "runs/x"]) == 2
    assert "'--run-dir'" in capsys.readouterr().err
    assert main(["train", "x.yaml"]) == 2
    assert "--run-dir" in capsys.readouterr().err


EXPERIMENT = """name: tiny
model: {num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8, vocab_size: 320}
data: {path: absent, lanes: 4, segment_length: 8}
engine: {kind: torch}
"""
RATES = ("--rates", "1e-3", "2e-3", "4e-3")
TUNE = ("scale", "plan", "x.yaml", *RATES)
PLAN = ("scale", "plan", "x.yaml", "--budgets", "1e12", "--output", "sweep.yaml")


def files_in(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "r", "--tokens=0"), "--tokens=0"),
        (("evaluate", "r", "--memory-length", "3", "-2"), "--memory-length=-2"),
        (("evaluate", "r", "--probe=needle", "--longest-distance=10T"), "1,048,576"),
        (("evaluate", "r", "--probe=needle", "--output=x.yaml"), "--output x.yaml"),
        (("evaluate", "r", "--probe", "foo"), "'attention'"),
        (("evaluate", "r", "--trials=5"), "--probe"),
        (("evaluate", "r", "--tasks=missing.yaml,arc_easy"), "missing.yaml"),
        (("evaluate", "r", "--tasks=x.yaml", "--memory-length", "1", "2"), "--memory-length"),
        (("evaluate", "r", "--same-length", "--memory-length=0"), "above 0"),
        (("report", "r", "--output=x.yaml"), "--output x.yaml"),
        (("verify-resume", "x.yaml", "--resume-ranks=0"), "--resume-ranks=0"),
        (("import-original", "folder", "--config=x.yaml", "--output=o"), "folder"),
        (("describe", "x.yaml", "data.path="), "data.path: "),
        (("describe", "nowhere.yaml"), "nowhere.yaml"),
        (("describe", "x.yaml", "--micro-batch-size=4"), "here it is engine.micro_batch_lanes"),
        (("describe", "x.yaml", "--gpus-per-node", "3"), "data.lanes=4 "),
        (("describe", "x.yaml", "--nodes", "0"), "--nodes=0"),
        (("describe", "x.yaml", "--mfu", "2"), "--mfu=2.0"),
        (("describe", "x.yaml", "model.vocab_size=0"), "model.vocab_size is not set"),
        (("new", "x.yaml/y.yaml", "--corpus=CORPUS", "--parameters=1M"), "x.yaml"),
        (("new", "x.yaml", "--corpus=CORPUS"), "x.yaml"),
        (("new", "b", "--corpus=CORPUS"), "b.yaml"),
        (("new", "b.yaml", "--corpus=nowhere"), "nowhere/train"),
        (("new", "b.yaml", "--corpus=CORPUS", "--parameters=1k"), "9.6k"),
        (("new", "b.yaml", "--corpus=CORPUS", "--parameters=much"), "10M"),
        (("new", "b.yaml", "--corpus=CORPUS", "--steps=0"), "--steps=0"),
        (("new", "b.yaml", "--corpus=CORPUS", "optim.stepz=20"), "'optim.steps'"),
        (("new", "b c.yaml", "--corpus=CORPUS"), "'b c'"),
        ((*TUNE, "--output=folder/table.csv"), "table.csv"),
        ((*TUNE, "--name=../x"), "'../x'"),
        ((*TUNE, "optim.steps=99999999999999"), "optim.steps=99999999999999"),
        ((*PLAN, "--sizes=99999999"), "99999999 sizes"),
        ((*PLAN, "--memories=9"), "--memories"),
        ((*PLAN[:3], "--seeds=1"), "--budgets, --rates, or --segments"),
        (("scale", "fit", "t", "--flops=1", "--experiment=x.yaml", "--write=x.yaml"), "x.yaml"),
    ],
)
def test_a_useless_value_is_one_line(corpus, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(EXPERIMENT)
    Path("folder").mkdir()
    Path("folder/table.csv").write_text("name,loss\na,1\n")
    before = files_in(tmp_path)
    words = [each.replace("CORPUS", str(corpus.directory.parent)) for each in arguments]
    assert main(words) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.err.startswith("error: ")
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert files_in(tmp_path) == before


def test_a_folder_of_other_files_gets_no_lock_of_a_run_that_is_refused(corpus, tmp_path, capsys):
    (tmp_path / "x.yaml").write_text(EXPERIMENT)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    train = ["train", str(tmp_path / "x.yaml"), f"data.path={corpus.directory.parent}"]
    assert main([*train, "--run-dir", str(folder)]) == 2
    assert "(notes.txt)" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


CELL_PATHS = [Path(f"runs/mem/memory_length_{length}") for length in (0, 64, 256)]
GRID = """format: 1
name: mem
experiment: tiny.yaml
grid: {model.memory_length: [0, 64, 256]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a run `first`, and a sweep with what it keeps beside its cells."""
    RunDir.create(tmp_path / "runs" / "first", RunConfig(name="first"))
    for cell in CELL_PATHS:
        model = ModelConfig(vocab_size=300, memory_length=int(cell.name.rpartition("_")[2]))
        RunDir.create(tmp_path / cell, RunConfig(name=cell.name, model=model))
        (tmp_path / "runs" / "mem" / "logs" / cell.name).mkdir(parents=True)
    (tmp_path / "runs" / "mem" / "compare.csv").touch()
    (tmp_path / "runs" / "mem" / "sweep.lock").touch()
    (tmp_path / "tiny.yaml").write_text("name: tiny\nmodel: {vocab_size: 300}\n")
    (tmp_path / "mem.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_stands_for_the_run_in_runs_unless_there_is_such_a_path_here(here, capsys):
    def shown() -> str:
        assert launcher(["status", "first", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["path"]

    assert shown() == "runs/first"
    RunDir.create(here / "first", RunConfig(name="first"))
    assert shown() == "first"


def test_a_folder_and_a_sweep_file_stand_for_the_cells_in_their_order(here):
    first = Path("runs/first")
    assert runs_of([Path("mem.yaml")]) == CELL_PATHS
    assert runs_of([first, Path("runs/mem"), Path("mem.yaml")]) == [first, *CELL_PATHS]
    assert list(find_runs(Path("runs"))) == [first, *CELL_PATHS]


CELL_NAMES = "runs/mem/memory_length_0, runs"


@pytest.mark.parametrize(
    ("program", "arguments", "named"),
    [
        (pretrain, ["report", "frist"], "'first'"),
        (pretrain, ["report", "first"], "runs/first "),  # which has measured nothing
        (pretrain, ["report", "elsewhere/first"], "'first'"),
        (pretrain, ["generate", "mem"], CELL_NAMES),
        (pretrain, ["describe", "mem"], CELL_NAMES),
        (pretrain, ["report", "export"], "'pretrain evaluate'"),
        (launcher, ["logs", "mem"], CELL_NAMES),
        (launcher, ["cancel", "nowhere"], "nowhere"),
        (launcher, ["status", "tiny.yaml"], "tiny.yaml"),
        (pretrain, ["export", "tiny.yaml", "--output=x"], "tiny.yaml"),
        (pretrain, ["report", "other.yaml"], "runs/other"),
        (pretrain, ["report", "mem.yaml"], "runs/mem/memory_length_0"),
    ],
)
def test_what_is_no_run_gets_one_line_with_what_to_name(here, capsys, program, arguments, named):
    Path("other.yaml").write_text(GRID.replace("name: mem", "name: other"))
    Path("export").mkdir()
    Path("export/model.safetensors").touch()
    assert program(arguments) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


SCRIPT = r"""
import logging, sys, warnings
from pretrain.terminal.log import adopt_logger, set_up_logging
foreign = logging.getLogger("Foreign")
foreign.propagate = False
foreign.addHandler(logging.StreamHandler(sys.stdout))
set_up_logging("someone else")
set_up_logging("rank 3", *sys.argv[1:])
adopt_logger("Foreign", ignored="harmless")
logging.getLogger("pretrain.run").debug("detail")
logging.getLogger("pretrain.run").info("step %d", 7)
logging.getLogger("launcher.supervisor").error("no attempt is left")
logging.getLogger("launcher.supervisor").error("https://me:secret@host/a?sig=1 \x1b[2J")
logging.getLogger("library").info("chatter")
foreign.info("chatter")
foreign.warning("a harmless thing")
foreign.warning("no fused kernel")
warnings.warn("old API", UserWarning)
"""
LINES = [
    "DEBUG TIME rank 3: detail",
    "INFO TIME rank 3: step 7",
    "ERROR TIME rank 3: no attempt is left",
    "ERROR TIME rank 3: https://***@host/a?*** \\x1b[2J",
    "WARNING TIME rank 3: no fused kernel",
    "WARNING TIME rank 3: <string>:18: UserWarning: old API",
]


def logged(*arguments: str, **variables: str) -> list[str]:
    command, environment = [sys.executable, "-c", SCRIPT, *arguments], {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return re.sub(r"\b\d\d:\d\d:\d\d\b", "TIME", done.stderr).splitlines()


def test_every_line_has_level_time_and_writer_and_libraries_report_only_warnings():
    assert logged() == LINES[1:]


def test_the_level_is_an_argument_or_inherited_and_the_argument_wins():
    assert logged("debug") == LINES
    assert logged(PRETRAIN_LOG_LEVEL="error") == LINES[2:4]
    assert logged("info", PRETRAIN_LOG_LEVEL="error") == LINES[1:]
    assert logged(PRETRAIN_LOG_LEVEL="nonsense") == LINES[1:]


ROWS = [["case", "loss", "verdict"], ["short", "12.5", "ok"], ["a longer one", "3", "-"]]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["books-lr0.1", "books-lr0.2"], ["lr0.1", "lr0.2"]),
        (["sweep/c1-d64", "sweep/c1-d128"], ["d64", "d128"]),
        (["small", "smaller"], ["small", "smaller"]),
        (["a-", "a-b"], ["a-", "a-b"]),
        (["a-b", "a-b"], ["b", "b"]),
        (["a-b"], ["a-b"]),
        ([], []),
    ],
)
def test_names_are_shown_without_the_words_that_all_begin_with(names, shown):
    assert distinguished(names) == shown


def test_a_table_wider_than_the_terminal_becomes_several_that_name_their_rows():
    assert fitted_table(ROWS, 0) == fitted_table(ROWS, 40)
    lines = fitted_table(ROWS, 40).splitlines()
    assert [re.split(" {2,}", line) for line in lines] == ROWS
    assert len(set(map(len, lines))) == 1
    narrow = fitted_table(ROWS, 20)
    assert narrow.split("\n\n") == [
        text_table([row[:2] for row in ROWS]),
        text_table([[row[0], row[2]] for row in ROWS]),
    ]
    assert max(map(len, narrow.splitlines())) <= 20 + 2


def test_no_number_loses_its_digits_or_its_unit():
    times = [step_time(seconds) for seconds in (1234.5678, 0.0999, 1.234e-4, 3e-9)]
    assert times == ["1,234.568 s", "99.9 ms", "0.123 ms", "0.003 us"]
    counts = [counted(number, "rank") for number in (0, 1, 1000)]
    assert counts == ["0 ranks", "1 rank", "1,000 ranks"]
    numbers = [si(number) for number in (1.5, 999.7e3, 8.123e6, 5e34)]
    assert numbers == ["1.5 ", "1 M", "8.12 M", "5e+04 Q"]


def test_a_rank_tells_its_launcher_by_its_status_that_storage_failed(tmp_path, capsys):
    (tmp_path / "x.yaml").symlink_to("/proc/self/mem")  # whose first byte nobody can read
    for name, status in (("x.yaml", EXIT_SITE_FAILED), ("missing.yaml", 2)):
        where = ["--run-dir", str(tmp_path / "run")]
        assert main(["train", str(tmp_path / name), *where]) == status
        assert capsys.readouterr().err.count("\n") == 1
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
