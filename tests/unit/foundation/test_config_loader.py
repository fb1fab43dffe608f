import os
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from foundation.errors import ConfigError
from foundation.settings import load_config, parse_config
from foundation.typed_values import to_tree
from foundation.yaml_files import SHIPPED, dump_yaml, parse_override, read_tree
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
    assert list(tree.values()) == list(numbers.values())
    assert all(isinstance(tree[f"n{n}"], type(v)) for n, v in enumerate(numbers.values()))
    with pytest.raises(ConfigError, match="'a=010'"):
        parse_override("a=010")
    loaded = load_config(Outer, write(tmp_path / "b.yaml", "name: 7\ncount: 1e6\n"))
    assert (loaded.name, loaded.count) == ("7", 1_000_000)


@pytest.mark.parametrize("extended", ["[a.yaml]", "[{next}.yaml, {next}.yaml]"])
def test_files_that_extend_each_other_or_two_files_each_are_an_error(tmp_path, extended):
    """A circle, and two to the power of 24 files."""
    for name, following in pairwise("abcdefghijklmnopqrstuvwxy"):
        write(tmp_path / f"{name}.yaml", f"extends: {extended.format(next=following)}\n")
    write(tmp_path / "y.yaml", "name: x\n")
    assert "a.yaml" in error_of(tmp_path / "a.yaml")


def test_all_mistakes_are_reported_together(tmp_path):
    text = "cuont: 1\nflag: 7\ninner: {rate: -1, sizes: [1, x], mode: medium}\ndeeper: {a: 1}\n"
    path = write(tmp_path / "a.yaml", text)
    first, *others = error_of(path).splitlines()
    assert first.startswith(f"{path}: ")
    fields = ["cuont", "deeper", "flag", "inner.mode", "inner.sizes.1", "name"]
    assert sorted(line.split(":")[0].strip() for line in others) == fields
    assert sum("'count'" in line for line in others) == 1, "the nearest name"


def test_an_override_is_blamed_for_its_own_mistakes_and_the_file_for_the_others(tmp_path):
    path = write(tmp_path / "a.yaml", "name: x\n")
    for wrong in ("inner.rate=-1", "cuont=1"):
        assert error_of(path, wrong).startswith("command line")
    write(path, "name: x\nflag: 7\n")
    of_file, of_override = error_of(path, "cuont=1").split("\n")
    assert of_file.startswith(f"{path}: flag: ")
    assert of_override.startswith("command line")
    assert error_of(path, "count=3").startswith(f"{path}: flag: ")


@pytest.mark.parametrize("override", ["count", "=3", "inner.=3", ".count=2", "count=[1"])
def test_a_malformed_override_is_rejected_with_its_text(tmp_path, override):
    assert f"override {override!r}" in error_of(write(tmp_path / "a.yaml", "name: x\n"), override)


def test_an_empty_section_changes_nothing(tmp_path):
    write(tmp_path / "base.yaml", "name: base\ninner: {rate: 3}\n")
    path = write(tmp_path / "a.yaml", "extends: base.yaml\ninner:\n")
    assert load_config(Outer, path).inner.rate == 3.0
    assert load_config(Outer, write(tmp_path / "b.yaml", "name: x\ninner:\n")).inner == Inner()


def test_a_missing_file_suggests_a_similar_one_and_names_the_file_that_extends_it(tmp_path):
    write(tmp_path / "base.yaml", "name: x\n")
    assert "'base.yaml'" in error_of(tmp_path / "bsae.yaml")
    own = write(tmp_path / "own.yaml", "extends: bsae.yaml\n")
    assert str(own) in error_of(own)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("name: x\ninner: {rate: 3\ncount: 1\n", "a.yaml:3:6: "),
        ("name: x\ncount: 1\ncount: 2\n", "a.yaml:3:1: "),
        ("name: x\ncount: 0300\n", "a.yaml:2:8: "),
        ("name: -007\n", "a.yaml:1:7: "),
        ("name: x\ncount: 1\0\n", "a.yaml:2:9: "),
        ("- name\n", "['name']"),
        ("name: x\nextends: 3\n", "extends=3"),
        ("name: x\ncount: yes\n", "count: "),
        ("name: x\ninner: {rate: .nan}\n", "inner.rate: "),
        ("name: x\ninner: 3\n", "inner: "),
        ("name: x\ncount: 5:00\n", "count: "),
        ("name: x\ninner: {rate: 1:30.5}\n", "inner.rate: "),
        ("name: x\ninner: {sizes: 3}\n", "inner.sizes: "),
        ("# name: x\n", "a.yaml is empty"),
    ],
)
def test_a_broken_file_is_rejected_with_the_location(tmp_path, text, place):
    said = error_of(write(tmp_path / "a.yaml", text))
    assert place in said
    assert "\n" not in said


def test_a_directory_a_binary_file_or_a_pipe_is_rejected(tmp_path):
    assert str(tmp_path) in error_of(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"name: \xff\xfe")
    assert "b.yaml" in error_of(tmp_path / "b.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    said = error_of(write(tmp_path / "x.yaml", "extends: pipe.yaml\n"))
    assert "pipe.yaml" in said
    assert "x.yaml" in said


@pytest.mark.parametrize(
    "private", ["- s3cret\n", "user: s3cret: x\n", "login s3cret\n", "s: !s3cret\n"]
)
def test_a_file_that_is_extended_is_not_shown_in_an_error(tmp_path, private):
    write(tmp_path / "private", private)
    said = error_of(write(tmp_path / "a.yaml", "extends: private\n"))
    assert f"{tmp_path}/private" in said
    assert "s3cret" not in said
    assert "s3cret" in error_of(tmp_path / "private")


def test_what_is_written_reads_back_equal(tmp_path):
    for config in (
        RunConfig(),
        Outer(name="1e-3", inner=Inner(rate=1e-8, sizes=(1, 2), extra={"a": {"b": [1.5]}})),
    ):
        path = write(tmp_path / "resolved.yaml", dump_yaml(to_tree(config)))
        assert load_config(type(config), path) == config
        assert parse_config(type(config), to_tree(config), "memory") == config


def test_sections_in_a_list_are_checked_as_any_other(tmp_path):
    text = "name: x\nothers: [{rate: 1}, {rate: 2, mod: fast}, {rate: x}, 3]\n"
    said = error_of(write(tmp_path / "a.yaml", text))
    for field_of_it in ("others.1.mod: ", "'others.1.mode'", "others.2.rate: ", "others.3: "):
        assert field_of_it in said
    text = "name: x\nothers: [{rate: 1}, {mode: fast}]\n"
    right = load_config(Outer, write(tmp_path / "b.yaml", text))
    assert right.others == (Inner(rate=1.0), Inner(mode="fast"))
    assert parse_config(Outer, to_tree(right), "tree") == right


def test_a_shipped_configuration_is_found_everywhere_after_the_users_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = Path("configs/data/bytes.yaml")
    assert read_tree(wanted) == read_tree(SHIPPED / "data" / "bytes.yaml")
    assert "'bytes.yaml'" in error_of(wanted.with_name("byte.yaml"))
    wanted.parent.mkdir(parents=True)
    write(wanted, "name: own\n")
    assert read_tree(wanted) == {"name": "own"}


HOSTILE = {
    "aliases": "a0: &a0 [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)),
    "itself": "a: &a [*a]\n",
    "deep": "a: " + "[" * 5000 + "]" * 5000,
    "deep lists": "- " * 400_000 + "a\n",
    "deep sections": "\n".join(" " * depth + "a:" for depth in range(600)) + "\n",
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


@pytest.mark.parametrize(
    "text", ["2026_11_28", "1e5", "1.10", "2026-11-28", "12", "0x1F", ".5", "1_000.0", "24:00"]
)
def test_a_text_keeps_its_spelling(tmp_path, text):
    path = write(tmp_path / "a.yaml", f"name: {text}\ninner: {{extra: {{a: {text}}}}}\n")
    assert load_config(Outer, path).name == text
    assert load_config(Outer, path, [f"name={text}"]).name == text
    assert dump_yaml(read_tree(path))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("count=true", "count"),
        ("name=yes", "name"),
        ("name=true", "name"),
        ("inner.sizes=[1, true]", "inner.sizes.1"),
        ("inner.sizes=[1, 2\u0660]", "inner.sizes.1"),
        ("count=\uff12", "count"),
        ("path=", "path"),
        ("path=''", "path"),
        (f"inner.mode={'x' * 5000}", "inner.mode"),
        (f"inner.rate={'9' * 99}x", "inner.rate"),
    ],
)
def test_what_is_no_number_or_path_is_refused_by_its_name_in_a_short_line(
    tmp_path, override, problem
):
    path = write(tmp_path / "a.yaml", "name: a\n")
    message = error_of(path, override)
    assert f": {problem}: found " in message
    assert len(message) < 400


def test_a_megabyte_of_nonsense_is_refused_at_once(tmp_path):
    text = "".join(f"n{number}: 1\n" for number in range(90_000))
    began = time.process_time()
    assert "names and values" in error_of(write(tmp_path / "a.yaml", text))
    one = time.process_time() - began
    began = time.process_time()
    error_of(write(tmp_path / "b.yaml", text[: len(text) // 20]))
    assert one < 20 * (time.process_time() - began)
