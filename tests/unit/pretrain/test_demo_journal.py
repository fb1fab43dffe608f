from __future__ import annotations

import json

import pytest

from data_pipeline.errors import ConfigError
from pretrain.demo.journal import Journal, key_of


def test_a_finished_stage_is_kept_until_what_it_rests_on_changes(tmp_path):
    first, second = key_of("", {"text": 1}), key_of("", {"text": 2})
    journal = Journal.open(tmp_path / "demo", fresh=False)
    journal.begin("corpus", first)
    journal.finish("corpus", {"documents": 3}, 1.5)
    again = Journal.open(tmp_path / "demo", fresh=False)
    assert again.finished("corpus", first) == {"documents": 3}
    assert again.finished("corpus", second) is None
    assert again.finished("tokenizer", first) is None
    assert again.seconds() == 1.5


def test_a_key_depends_on_all_stages_before():
    assert key_of(key_of("", {"a": 1}), {"b": 1}) != key_of(key_of("", {"a": 2}), {"b": 1})
    assert key_of(key_of("", {"a": 1}), {"b": 1}) == key_of(key_of("", {"a": 1}), {"b": 1})


def test_a_stage_that_was_stopped_may_go_on_only_with_the_same_key(tmp_path):
    journal = Journal.open(tmp_path, fresh=False)
    assert journal.begin("train", "one") is False
    reopened = Journal.open(tmp_path, fresh=False)
    assert reopened.finished("train", "one") is None
    assert reopened.begin("train", "one") is True
    assert reopened.begin("train", "two") is False


def test_fresh_empties_a_demos_directory_and_nothing_elses(tmp_path):
    journal = Journal.open(tmp_path / "demo", fresh=False)
    (journal.directory / "data").mkdir()
    (journal.directory / "data" / "shard").touch()
    Journal.open(journal.directory, fresh=True)
    assert [path.name for path in journal.directory.iterdir()] == ["demo.json"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        Journal.open(tmp_path / "precious", fresh=True)
    assert (tmp_path / "precious" / "thesis.txt").exists()


@pytest.mark.parametrize("contents", ["{", '{"format": 99, "stages": {"corpus": {}}}', "[]"])
def test_an_unreadable_journal_means_that_every_stage_is_made_again(tmp_path, contents):
    (tmp_path / "demo.json").write_text(contents)
    assert Journal.open(tmp_path, fresh=False).stages == {}
    assert json.loads((tmp_path / "demo.json").read_text())["stages"] == {}
