from __future__ import annotations

import pytest
import yaml

from foundation.settings import to_tree
from foundation.yaml_files import _PLAIN, _load, _load_with, _loader, dump_yaml
from pretrain.config.run import RunConfig

WRITTEN = dump_yaml(to_tree(RunConfig()))


@pytest.mark.parametrize(
    "text",
    [
        WRITTEN,
        "a: 1e-3\nb: 5:00\nc: ~\nd: 'it''s: 1'\ne:\n- 0x1f\n- - x\n  - 2.5\n# note\nf: g\n  h\n",
        "a: []\nb: {}\nc: 2026-11-23\nd: Yes\ne: .inf\nf: 1_000\n",
    ],
)
def test_both_parsers_read_what_we_write_alike(text):
    assert yaml.__with_libyaml__
    assert _PLAIN.fullmatch(text)
    by_libyaml, by_python = (
        _load_with(_loader(kind), text) for kind in (yaml.CSafeLoader, yaml.SafeLoader)
    )
    assert repr(by_libyaml) == repr(by_python)


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "a: 0300\n", "a: 'b\n", "a: b: c\n"])
def test_what_a_file_gets_wrong_is_said_in_the_same_words_by_either(text):
    with pytest.raises(yaml.YAMLError) as said:
        _load(text)
    with pytest.raises(yaml.YAMLError) as by_python:
        _load_with(_loader(yaml.SafeLoader), text)
    assert str(said.value) == str(by_python.value)


@pytest.mark.parametrize(
    "text", ["- " * 400_000 + "a\n", "\n".join(" " * depth + "a:" for depth in range(600)) + "\n"]
)
def test_no_nesting_exhausts_the_stack(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        _load(text)
