from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.records import fraction_of
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import MANIFEST_NAME
from foundation.errors import ConfigError, DataError
from tests.helpers.corpora import (
    config_of,
    contents,
    documents_of,
    some_texts,
    write_jsonl,
)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "bytes"])
def test_every_document_is_in_one_split_whole_and_chosen_by_its_id(tmp_path, kind):
    texts = some_texts()
    config = config_of(tmp_path, texts, tokenizer=TokenizerConfig(kind=kind, vocab_size=320))
    result = build_corpus(config)
    train, validation = (
        documents_of(config.output / "train"),
        documents_of(config.output / "validation"),
    )
    assert {**train, **validation} == {f"d{number}": text for number, text in enumerate(texts)}
    assert set(validation) == {f"d{n}" for n in range(len(texts)) if fraction_of(f"d{n}") < 0.2}
    assert not set(train) & set(validation)
    manifest = result.manifests["train"]
    assert manifest.documents == len(train)
    assert manifest.text_bytes == sum(len(text.encode()) for text in train.values())
    assert manifest.characters == sum(map(len, train.values()))
    assert manifest.longest_whole == max(
        int(length.max()) for length in lengths_of(config.output / "train")
    )
    assert not (config.output / ".build").exists()


def lengths_of(directory: Path) -> list[np.ndarray]:
    corpus = Corpus.open(directory)
    return [corpus.document_lengths(number) for number in range(len(corpus.manifest.shards))]


def test_shards_stay_under_their_size_except_for_one_long_document(tmp_path):
    config = config_of(tmp_path, [*some_texts(), "x" * 10_000, *some_texts(20, seed=2)])
    shards = build_corpus(config).manifests["train"].shards
    for shard in shards:
        assert shard.size < 3000 + 400 or shard.documents == 1  # 400: the shard's own header
    assert len(shards) > 8


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_bytes_with_any_threads(tmp_path, kind):
    made = []
    for name, count in (("a", 1), ("b", 3)):
        config = config_of(
            tmp_path / name,
            some_texts(),
            threads=count,
            tokenizer=TokenizerConfig(kind=kind, vocab_size=320),
        )
        build_corpus(config)
        made.append(contents(config.output))
    assert made[0] == made[1]


def test_the_tokenizers_training_sample_is_capped_and_spread_over_the_training_split(
    tmp_path,
):
    from data_pipeline.builder.build_tokenizer import training_sample
    from data_pipeline.builder.sources import list_sources

    texts = [f"{number} " * 30 + "\n\n" + f"{number} " * 30 for number in range(300)]
    config = config_of(
        tmp_path, texts, tokenizer=TokenizerConfig(training_bytes=8000, vocab_size=300)
    )
    sample = list(training_sample(list_sources(config.input, config), config))
    assert 4000 < sum(map(len, sample)) <= 8000
    numbers = [int(text.split()[0]) for text in sample]
    assert min(numbers) < 60
    assert max(numbers) > 240
    assert not {f"d{number}" for number in numbers} & {
        f"d{n}" for n in range(300) if fraction_of(f"d{n}") < 0.2
    }


def test_unusable_records_are_listed_and_too_many_stop_the_build_without_a_corpus(tmp_path):
    config = config_of(tmp_path, some_texts(40))
    with open(config.input[0], "ab") as file:
        file.write(b'{"text": 3}\nnonsense\n{"text": "good"}\n')
    with pytest.raises(
        DataError,
        match=r"more than max_rejects=1 unusable records, the last one is x.jsonl:42: invalid J",
    ):
        build_corpus(replace(config, max_rejects=1))
    assert not list(config.output.rglob(MANIFEST_NAME))
    result = build_corpus(replace(config, max_rejects=2))
    assert result.rejects == 2
    listed = [
        json.loads(line) for line in (config.output / "rejects.jsonl").read_text().splitlines()
    ]
    assert [reject["source"] for reject in listed] == ["x.jsonl:41", "x.jsonl:42"]
    assert "x.jsonl:43" in {
        **documents_of(config.output / "train"),
        **documents_of(config.output / "validation"),
    }


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_an_empty_corpus_is_rejected(tmp_path, kind, content):
    config = config_of(tmp_path, [], tokenizer=TokenizerConfig(kind=kind, vocab_size=300))
    config.input[0].write_text(content)
    with pytest.raises(
        DataError, match=r"no (documents|usable text) for the training split|has no usable text"
    ):
        build_corpus(config)
    assert not list(config.output.rglob(MANIFEST_NAME))


def test_a_validation_split_without_documents_is_rejected_with_what_to_change(tmp_path):
    config = config_of(tmp_path, some_texts(5), validation_fraction=0.0001)
    with pytest.raises(DataError, match=r"=0.0001 of 5 documents; the smallest .* 0.438; raise it"):
        build_corpus(config)
    for fraction, documents in ((0.437, 0), (0.438, 1)):
        smallest = replace(config, validation_fraction=fraction, output=tmp_path / f"{fraction}")
        if documents:
            assert build_corpus(smallest).manifests["validation"].documents == documents
            continue
        with pytest.raises(DataError, match="no documents for the validation split"):
            build_corpus(smallest)
    empty = write_jsonl(tmp_path / "empty.jsonl", [" "])
    with pytest.raises(
        DataError, match=r"in validation_input=.*/empty.jsonl; the first of 1 unusable .*: empty"
    ):
        build_corpus(replace(config, validation_input=(empty,)))
    assert not list(config.output.rglob(MANIFEST_NAME))


def test_building_again_changes_nothing_and_other_settings_are_rejected(tmp_path):
    config = config_of(tmp_path, some_texts())
    build_corpus(config)
    before = contents(config.output)
    assert build_corpus(replace(config, threads=2, max_rejects=7)).was_finished
    assert contents(config.output) == before
    with pytest.raises(ConfigError, match=rf"settings: shard_bytes {config.shard_bytes} -> 4000;"):
        build_corpus(replace(config, shard_bytes=4000))
    with open(config.input[0], "a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(ConfigError, match="other text or settings: the input files have changed;"):
        build_corpus(config)
    assert contents(config.output) == before


def test_a_directory_with_other_files_is_not_touched(tmp_path):
    config = config_of(tmp_path, some_texts(10))
    config.output.mkdir()
    (config.output / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="is not empty and does not hold a corpus"):
        build_corpus(config)
    assert contents(config.output) == {"thesis.tex": b"precious"}
