"""Every numeric setting has a range, and every command refuses what is out of it in one line."""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from data_pipeline.config import CorpusConfig
from foundation.errors import ConfigError
from foundation.settings import Range, parse_config, ranges_of
from launcher.cli import main as launcher
from pretrain.cli import main as pretrain
from pretrain.config.cluster import ClusterConfig
from pretrain.config.run import RunConfig

REQUIRED = {CorpusConfig: {"input": ["a"], "output": "b"}, ClusterConfig: {"ranks_per_node": 1}}
DRAWS = 8  # of numbers outside each range, besides the usual suspects
SUSPECTS = (-1, 10**30, -(10**30), 1e300, math.inf, -math.inf, math.nan)


def numeric_settings(schema: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple, Any, str]]:
    """The path, class and name of every setting that is a number or a tuple of numbers."""
    hints = get_type_hints(schema)
    for each in fields(schema):
        hint = hints[each.name]
        items = get_args(hint) if get_origin(hint) is tuple else (hint,)
        if is_dataclass(items[0]):
            inside = (*path, each.name, *((0,) if items[0] is not hint else ()))
            yield from numeric_settings(items[0], inside)
        elif {int, float} & set(items):
            yield (*path, each.name), schema, each.name


SETTINGS = [
    (root, path, schema, name)
    for root in (RunConfig, CorpusConfig, ClusterConfig)
    for path, schema, name in numeric_settings(root)
]


def tree_with(root: Any, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Settings in which only the one at `path` is given, and what has no default."""
    is_phase = "mixture" not in path  # the innermost section in a list; a mixture's part is none
    for part in reversed(path):
        if part == 0:  # sections in a list: what they need besides
            inner = {"from_step": 1, "lanes": 1} if is_phase else {"path": "x"}
            value, is_phase = [{**inner, **value}], True
        else:
            value = {part: value}
    return {**REQUIRED.get(root, {}), **value}


def outside(allowed: Range, seed: str) -> list[float]:
    """Numbers that the range does not have: near its ends, far away, and drawn."""
    draw = random.Random(seed)
    near = [math.nextafter(allowed.least, -math.inf), math.nextafter(allowed.most, math.inf)]
    near += [allowed.least - 1, allowed.most + 1]
    near += [allowed.least] * allowed.above + [allowed.most] * allowed.below
    far = [draw.choice((-1, 1)) * 10 ** draw.uniform(-3, 40) for _ in range(DRAWS)]
    return [value for value in (*near, *SUSPECTS, *far) if value not in allowed]


def test_a_number_outside_its_settings_range_is_refused_by_name():
    for root, path, schema, name in SETTINGS:
        allowed = ranges_of(schema).get(name)
        assert allowed is not None, f"{'.'.join(map(str, path))} has no range"
        default = next(each.default for each in fields(schema) if each.name == name)
        values = outside(allowed, name)
        assert len(values) > DRAWS
        for value in values:
            given = [value, *default[1:]] if isinstance(default, tuple) else value
            with pytest.raises(ConfigError) as caught:
                parse_config(root, tree_with(root, path, given), "file")
            assert name in str(caught.value)
            assert "\n" not in str(caught.value)


def test_the_ends_of_a_range_are_inside_it():
    for _, path, schema, name in SETTINGS:
        allowed = ranges_of(schema)[name]
        for end, is_left_out in ((allowed.least, allowed.above), (allowed.most, allowed.below)):
            assert (end in allowed) is not is_left_out, path
        assert math.nan not in allowed, path
        default = next(each.default for each in fields(schema) if each.name == name)
        for value in default if isinstance(default, tuple) else (default,):
            assert value is MISSING or value in allowed, path


def test_a_settings_object_made_by_code_is_checked_as_a_file_is():
    with pytest.raises(ConfigError, match=r"data\.lanes=0"):
        replace(RunConfig().data, lanes=0)
    with pytest.raises(ConfigError, match=r"d_head=-4 .*std=nan"):
        replace(RunConfig().model, d_head=-4, init_std=math.nan)


COMMANDS = [
    (pretrain, "describe run.yaml"),
    (pretrain, "train run.yaml --run-dir=run"),
    (pretrain, "verify-resume run.yaml"),
    (pretrain, "scale plan run.yaml --budgets=1e15 --output=plan"),
    (launcher, "local run.yaml"),
    (launcher, "submit run.yaml --cluster=configs/clusters/cpu.yaml"),
]


@pytest.mark.parametrize(("main", "words"), COMMANDS)
def test_every_command_refuses_a_number_in_a_line(main, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("name: x\n")
    for setting in ("data.lanes=1e12", "data.segment_length=1e7"):
        start = time.process_time()
        assert main([*words.split(), setting]) == 2
        assert time.process_time() - start < 5
        said = capsys.readouterr().err
        name = setting.partition("=")[0]
        assert f" (over run.yaml): {name}=" in said
        assert said.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
