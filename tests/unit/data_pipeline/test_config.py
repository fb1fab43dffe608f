from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.config import CorpusConfig
from foundation.errors import ConfigError
from foundation.settings import load_config, parse_config

CONFIGS = sorted((Path(__file__).parents[3] / "configs" / "data").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_example_configs_need_only_input_and_output(path):
    config = load_config(CorpusConfig, path, ["input=[a]", "output=b"])
    assert (config.input, config.output) == ((Path("a"),), Path("b"))
    with pytest.raises(ConfigError, match="input"):
        load_config(CorpusConfig, path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input": []}, "input names no file or folder"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0 must be at least 0 and below 1"),
        ({"shard_bytes": 0}, "shard_bytes=0 must be from"),
        ({"shard_bytes": 1 << 32}, "shard_bytes=4294967296 must be from"),
        ({"max_document_bytes": 1 << 31}, "max_document_bytes=2147483648 must be from"),
        ({"max_rejects": -1}, "max_rejects=-1 must be from 0"),
        ({"tokenizer": {"vocab_size": 100}}, "tokenizer.vocab_size=100 must be from 300"),
        ({"tokenizer": {"training_bytes": 0}}, "training_bytes=0 must be from 1"),
        ({"tokenizer": {"kind": "wordpiece"}}, "tokenizer.kind"),
    ],
)
def test_impossible_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(CorpusConfig, {"input": ["a"], "output": "b", **settings}, source="test")


def test_there_are_example_configs():
    assert len(CONFIGS) >= 3
