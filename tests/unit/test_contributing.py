"""What contributors and their tools read names commands, files and numbers that exist."""

import importlib
import json
import re

import pytest
import yaml

from docs import commands_page
from tests.helpers.checkout import ROOT

YAML_FILES = [
    *sorted((ROOT / ".github").rglob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
]
PROGRAMS = {"data-pipeline": "data_pipeline", "pretrain": "pretrain", "launcher": "launcher"}
MAKEFILE = (ROOT / "Makefile").read_text()
GUIDES = [ROOT / f"{name}.md" for name in ("README", "AGENTS", "CONTRIBUTING")]
PAGES = [*GUIDES, *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_files_are_objects(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_public_workflow_runs_what_every_submission_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = workflow["jobs"]["ci"]["steps"]
    assert [step["run"].split()[-1] for step in steps if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_hooks_before_a_commit_run_tools_of_the_lock():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    locked = (ROOT / "requirements-dev.lock").read_text()
    for hook in repository["hooks"]:
        tool = re.fullmatch(r"\.venv/bin/(\S+) .*", hook["entry"])
        assert tool is not None
        assert re.search(rf"^{tool[1]}==", locked, re.MULTILINE)


def test_versions_agree():
    stated = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert stated is not None
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    releases = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited["version"] == stated[1]
    assert releases[0] == f"{stated[1]} ({cited['date-released']})"


def test_the_commands_page_is_what_its_command_writes():
    written = commands_page.PATH.read_text()
    assert written == commands_page.page(), "run: python -m docs.commands_page"


def flags_of(words: list[str]) -> list[str]:
    """Return the flags of a command line's command; [] if there is no such command."""
    program = importlib.import_module(f"{PROGRAMS[words[0]]}.cli").PROGRAM
    return program.candidates([words[1], "-"]) or program.candidates([*words[1:3], "-"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_of_a_page_exist(page):
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```\n(.*?)^```|((?:^    [^\n]*\n)+)", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip(" $") for block in blocks for line in "".join(block).splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    lines.append(
        json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["postCreateCommand"]
    )
    for line in lines:
        words = re.split(r" {3,}|[#;]", line)[0].split()
        if len(words) > 1 and words[0] in PROGRAMS and not words[1].startswith(("-", "[")):
            flags = {word.strip("[].,").partition("=")[0] for word in words if "--" in word[:3]}
            assert {"--help", *flags} <= set(flags_of(words)), line
        elif words[:1] == ["make"] and words[1:]:
            assert re.search(rf"^{words[1]}:", MAKEFILE, re.MULTILINE), line
        elif words[:2] == ["python", "-m"]:
            for path in (word for word in words if word.startswith("tests/") and "*" not in word):
                assert (ROOT / path).exists(), line


def test_exit_statuses_of_agents_are_those_of_the_commands():
    tables = [
        re.findall(r"^\| \d+ \| .*$", (ROOT / page).read_text(), re.MULTILINE)
        for page in ("AGENTS.md", "docs/commands.md")
    ]
    assert tables[0] == tables[1] != []


def test_each_promise_of_the_reliability_page_has_its_test():
    page = (ROOT / "docs/reliability.md").read_text()
    unit = {"u": "pretrain", "l": "launcher", "d": "data_pipeline", "f": "foundation"}
    slurm = {"sites": "survival_of_sites", "starts": "survival_of_starts_and_spares"}
    promises = re.findall(r"`(?:(\w)/)?((?:\w+/)*)(\w+)::(test_\w+)`", page)
    assert len(promises) > 50
    for place, folder, name, test in promises:
        if place:
            root = f"unit/{unit[place]}" if place in unit else "integration"
            path = f"{root}/{folder}test_{name}.py"
        else:
            path = f"slurm/test_{slurm.get(name, name)}.py"
        assert f"def {test}(" in (ROOT / "tests" / path).read_text(), f"{path}::{test}"
