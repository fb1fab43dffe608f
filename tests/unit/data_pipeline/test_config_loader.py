from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from foundation.errors import ConfigError
from foundation.settings import differences, load_config, parse_config, to_tree
from foundation.yaml_files import SHIPPED, _load, dump_yaml, parse_override, read_tree
from pretrain.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    sizes: tuple[int, ...] = ()
    mode: Literal["slow", "fast"] = "slow"
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ConfigError(f"inner.rate={self.rate} is negative; use 0 or more")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    count: int = 1
    flag: bool = False
    path: Path = Path("here")
    inner: Inner = field(default_factory=Inner)
    others: tuple[Inner, ...] = ()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, path, overrides)
    return str(caught.value)


def test_numbers_and_texts_of_every_form_keep_their_value(tmp_path):
    numbers = {"0": 0, "-12": -12, "0x1F": 31, "1_000": 1000, "1.": 1.0, ".5": 0.5, "1e-3": 1e-3,
               "2.5E+4": 2.5e4, ".5e1": 5.0, "1_000e0": 1000.0}  # fmt: skip
    text = "".join(f"n{number}: {written}\n" for number, written in enumerate(numbers))
    tree = read_tree(write(tmp_path / "a.yaml", f"{text}time: 24:00:00\n"))
    assert tree.pop("time") == parse_override("a=24:00:00")["a"] == "24:00:00"
    assert [(each, type(each)) for each in tree.values()] == [
        (each, type(each)) for each in numbers.values()
    ]
    with pytest.raises(ConfigError, match=r"override 'a=010': invalid YAML: 010 starts with 0"):
        parse_override("a=010")
    loaded = load_config(Outer, write(tmp_path / "b.yaml", "name: 7\ncount: 1e6\n"))
    assert (loaded.name, loaded.count) == ("7", 1_000_000)


def test_later_sources_win_key_by_key(tmp_path):
    write(tmp_path / "base.yaml", "name: base\ncount: 1\ninner: {rate: 1, mode: fast}\n")
    write(tmp_path / "more.yaml", "extends: base.yaml\ncount: 2\n")
    path = write(tmp_path / "own.yaml", "extends: [base.yaml, more.yaml]\ninner:\n  rate: 3\n")
    loaded = load_config(Outer, path, ["inner.rate=4.5", "name=override"])
    assert loaded == Outer(name="override", count=2, inner=Inner(rate=4.5, mode="fast"))


def test_extends_is_relative_to_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    write(tmp_path / "base.yaml", "name: base\n")
    write(tmp_path / "deep/middle.yaml", "extends: ../base.yaml\n")
    path = write(tmp_path / "top.yaml", "extends: deep/middle.yaml\n")
    monkeypatch.chdir("/")
    assert load_config(Outer, path).name == "base"


def test_an_extends_cycle_is_named(tmp_path):
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    write(tmp_path / "b.yaml", "extends: a.yaml\n")
    assert "a.yaml -> b.yaml -> a.yaml" in error_of(tmp_path / "a.yaml")


def test_all_mistakes_are_reported_together(tmp_path):
    text = "cuont: 1\nflag: 7\ninner: {rate: -1, sizes: [1, x], mode: medium}\ndeeper: {a: 1}\n"
    message = error_of(write(tmp_path / "a.yaml", text))
    assert message.startswith(f"{tmp_path}/a.yaml: 6 problems\n")
    for expected in (
        "name: missing; it has no default",
        "cuont: unknown setting; did you mean 'count'?",
        "deeper: unknown setting",
        "flag: found 7",
        "inner.sizes.1: found 'x', expected a valid integer",
        "inner.mode: found 'medium', expected 'slow' or 'fast'",
    ):
        assert expected in message


def test_an_override_is_blamed_for_its_own_mistakes_and_the_file_for_the_others(tmp_path):
    path = write(tmp_path / "a.yaml", "name: x\n")
    assert error_of(path, "inner.rate=-1") == (
        f"command line (over {path}): inner.rate=-1.0 is negative; use 0 or more"
    )
    assert error_of(path, "cuont=1").startswith(f"command line (over {path}): cuont: unknown")
    write(path, "name: x\nflag: 7\n")
    of_file, of_override = error_of(path, "cuont=1").split("\n")
    assert of_file.startswith(f"{path}: flag: found 7")
    assert of_override.startswith(f"command line (over {path}): cuont: unknown")
    assert error_of(path, "count=3").startswith(f"{path}: flag: found 7")


@pytest.mark.parametrize("override", ["count", "=3", "inner.=3", ".count=2", "count=[1"])
def test_a_malformed_override_is_rejected_with_its_text(tmp_path, override):
    assert f"override {override!r}" in error_of(write(tmp_path / "a.yaml", "name: x\n"), override)


def test_an_empty_section_changes_nothing(tmp_path):
    write(tmp_path / "base.yaml", "name: base\ninner: {rate: 3}\n")
    assert (
        load_config(Outer, write(tmp_path / "a.yaml", "extends: base.yaml\ninner:\n")).inner.rate
        == 3.0
    )
    assert load_config(Outer, write(tmp_path / "b.yaml", "name: x\ninner:\n")).inner == Inner()


def test_a_missing_file_suggests_a_similar_one_and_names_the_file_that_extends_it(tmp_path):
    write(tmp_path / "base.yaml", "name: x\n")
    assert f"{tmp_path}/bsae.yaml does not exist; did you mean 'base.yaml'?" in error_of(
        tmp_path / "bsae.yaml"
    )
    write(tmp_path / "own.yaml", "extends: bsae.yaml\n")
    assert f"which {tmp_path}/own.yaml extends, does not exist" in error_of(tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: x\ninner: {rate: 3\ncount: 1\n", "a.yaml:3:6: not valid YAML: "),
        ("name: x\ninner: {rate: 3\ncount: 1\n", ", in 'count: 1'"),
        ("name: x\ncount: 1\ncount: 2\n", "a.yaml:3:1: not valid YAML: 'count' is given twice"),
        ("- name\n", "holds ['name'], expected settings"),
        ("name: x\nextends: 3\n", "extends=3 must be a file name or a list of file names"),
        ("name: x\ncount: yes\n", "count: found True, expected a number"),
        ("name: x\ninner: {rate: .nan}\n", "inner.rate: found nan, expected a finite number"),
        ("name: x\ninner: 3\n", "inner: found 3, expected a section"),
        ("name: x\ncount: 0300\n", "a.yaml:2:8: not valid YAML: 0300 starts with 0: write 300"),
        ("name: -007\n", "starts with 0: write -7, or '-007' for a text"),
        ("name: x\ncount: 5:00\n", "count: found '5:00', expected a valid integer"),
        ("name: x\ninner: {rate: 1:30.5}\n", "inner.rate: found '1:30.5', expected a valid number"),
        (
            "name: x\ninner: {sizes: 3}\n",
            "inner.sizes: found 3, expected a list, such as [1, 2]",
        ),
        ("name: x\ncount: 1\0\n", "a.yaml:2:9: not valid YAML: unacceptable character #x0000"),
        ("", "a.yaml is empty, expected settings as 'name: value' lines"),
        ("# name: x\n", "a.yaml is empty, expected settings as 'name: value' lines"),
    ],
)
def test_a_broken_file_is_rejected_with_the_location(tmp_path, text, expected):
    said = error_of(write(tmp_path / "a.yaml", text))
    assert expected in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "private", ["- s3cret\n", "user: s3cret: x\n", "login s3cret\n", "s: !s3cret\n"]
)
def test_a_file_that_is_extended_is_not_shown_in_an_error(tmp_path, private):
    write(tmp_path / "private", private)
    said = error_of(write(tmp_path / "a.yaml", "extends: private\n"))
    assert f"{tmp_path}/private" in said
    assert "s3cret" not in said
    assert "s3cret" in error_of(tmp_path / "private")


def test_a_directory_or_a_binary_file_is_rejected(tmp_path):
    assert "is a directory" in error_of(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"name: \xff\xfe")
    assert "is not UTF-8 text (byte 6)" in error_of(tmp_path / "b.yaml")


def test_what_is_written_reads_back_equal(tmp_path):
    for config in (
        RunConfig(),
        Outer(name="1e-3", inner=Inner(rate=1e-8, sizes=(1, 2), extra={"a": {"b": [1.5]}})),
    ):
        path = write(tmp_path / "resolved.yaml", dump_yaml(to_tree(config)))
        assert load_config(type(config), path) == config
        assert parse_config(type(config), to_tree(config), "memory") == config


def test_differences_name_the_keys_with_both_values():
    before = to_tree(Outer(name="a", inner=Inner(extra={"k": 1})))
    after = to_tree(Outer(name="b", inner=Inner(rate=2.0, extra={"j": 2})))
    assert differences(before, after) == {
        "name": ("a", "b"),
        "inner.rate": (0.5, 2.0),
        "inner.extra.k": (1, None),
        "inner.extra.j": (None, 2),
    }
    assert differences(before, before) == {}


def test_sections_in_a_list_are_checked_as_any_other(tmp_path):
    path = write(
        tmp_path / "a.yaml", "name: x\nothers: [{rate: 1}, {rate: 2, mod: fast}, {rate: x}, 3]\n"
    )
    said = error_of(path)
    assert "others.1.mod: unknown setting; did you mean 'mode'?" in said
    assert "others.2.rate: found 'x', expected" in said
    assert "others.3: found 3, expected a section; its settings are" in said
    right = load_config(
        Outer, write(tmp_path / "b.yaml", "name: x\nothers: [{rate: 1}, {mode: fast}]\n")
    )
    assert right.others == (Inner(rate=1.0), Inner(mode="fast"))
    assert parse_config(Outer, to_tree(right), "tree") == right


def test_a_shipped_configuration_is_found_from_everywhere_after_the_users_own(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wanted = Path("configs/data/bytes.yaml")
    assert read_tree(wanted) == read_tree(SHIPPED / "data" / "bytes.yaml")
    assert "did you mean 'bytes.yaml'?" in error_of(wanted.with_name("byte.yaml"))
    wanted.parent.mkdir(parents=True)
    write(wanted, "name: own\n")
    assert read_tree(wanted) == {"name": "own"}


HOSTILE = {
    "aliases": "a0: &a0 [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)),
    "itself": "a: &a [*a]\n",
    "deep": "a: " + "[" * 5000 + "]" * 5000,
    "integer": "a: " + "9" * 5000,
    "date": "a: 2001-99-99",
    "hexadecimal integer": "a: 0x" + "f" * 20_000,
    "NUL": 'a: {b: ["x\\0y"]}',
    "half a character": 'a: "\\ud800"',
    "large": "#" * (1 << 21),
    "number as text": f"count: '{'1' * 5_000}'",
    "surrogates": 'name: "\\ud907\\ude06"',
    "long numbers": f"name: {'1' * 200_000}.5\ncount: x",
    "many keys": "".join(f"key{n}: 1\n" for n in range(4_000)),
    "long keys": "".join(f"{'k' * 900}{n}: 1\n" for n in range(19)),
    "long name": f"extends: ['{'a' * 200_000} :/', 5]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_yaml_file_costs_no_time_and_few_lines(tmp_path, name):
    (tmp_path / "x.yaml").write_text(HOSTILE[name])
    started = time.process_time()
    with pytest.raises(ConfigError, match=r"x\.yaml") as error:
        load_config(Outer, tmp_path / "x.yaml")
    assert len(str(error.value)) < 3000
    assert str(error.value).count("\n") <= 20
    assert time.process_time() - started < 5


def test_files_that_extend_two_files_each_end_in_one_line(tmp_path):
    for level in range(24):
        (tmp_path / f"{level}.yaml").write_text(f"extends: [{level + 1}.yaml, {level + 1}.yaml]\n")
    (tmp_path / "24.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match=r"0\.yaml extends more than 64 files"):
        read_tree(tmp_path / "0.yaml")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "x.yaml").write_text("extends: pipe.yaml\n")
    with pytest.raises(ConfigError, match=r"pipe\.yaml, which .*/x\.yaml extends, cannot be read"):
        read_tree(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    "text", ["- " * 400_000 + "a\n", "\n".join(" " * depth + "a:" for depth in range(600)) + "\n"]
)
def test_no_nesting_exhausts_the_stack(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        _load(text)
