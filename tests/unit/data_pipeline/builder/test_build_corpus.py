import json
from dataclasses import replace

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.parallel_build import build_in_processes
from data_pipeline.cli import main
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpora.manifest import MANIFEST_NAME
from foundation.errors import ConfigError, DataError
from foundation.progress import Note
from tests.helpers.corpora import config_of, contents, documents_of, some_texts, stored, write_jsonl


@pytest.mark.parametrize("kind", ["unigram", "bpe", "bytes"])
def test_every_document_is_in_one_split_whole_and_chosen_by_its_id(tmp_path, kind):
    texts = some_texts()
    config = config_of(tmp_path, texts, tokenizer=TokenizerConfig(kind=kind, vocab_size=320))
    manifest = build_corpus(config).manifests["train"]
    train, validation = (documents_of(config.output / split) for split in ("train", "validation"))
    assert {**train, **validation} == {f"d{number}": text for number, text in enumerate(texts)}
    assert not set(train) & set(validation)
    assert 0.1 < len(validation) / len(texts) < 0.3
    fewer = config_of(tmp_path / "fewer", texts[:40])
    build_corpus(fewer)
    own = set(documents_of(fewer.output / "validation"))
    assert own == set(validation) & {f"d{number}" for number in range(40)}
    assert manifest.documents == len(train)
    assert manifest.text_bytes == sum(len(text.encode()) for text in train.values())
    assert manifest.characters == sum(map(len, train.values()))
    lengths = [len(tokens) for _, tokens in stored(config.output / "train")]
    assert (manifest.tokens, manifest.longest_whole) == (sum(lengths), max(lengths))
    assert not (config.output / ".build").exists()


def test_shards_stay_under_their_size_except_for_one_long_document(tmp_path):
    config = config_of(tmp_path, [*some_texts(), "x" * 10_000, *some_texts(20, seed=2)])
    shards = build_corpus(config).manifests["train"].shards
    for shard in shards:
        assert shard.size < 3000 + 400 or shard.documents == 1  # 400: the shard's own header
    assert len(shards) > 8


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_bytes_with_any_threads(tmp_path, kind):
    tokenizer = TokenizerConfig(kind=kind, vocab_size=320)
    made = []
    for name, count in (("a", 1), ("b", 3)):
        config = config_of(tmp_path / name, some_texts(), threads=count, tokenizer=tokenizer)
        build_corpus(config)
        made.append(contents(config.output))
    assert made[0] == made[1]


def test_the_tokenizers_training_sample_is_capped_and_spread_over_the_training_split(tmp_path):
    from data_pipeline.builder.build_tokenizer import training_sample
    from data_pipeline.builder.sources import list_sources

    texts = [f"{number} " * 30 + "\n\n" + f"{number} " * 30 for number in range(300)]
    small = TokenizerConfig(training_bytes=8000, vocab_size=300)
    config = config_of(tmp_path, texts, tokenizer=small)
    sample = list(training_sample(list_sources(config.input, config), config))
    assert 4000 < sum(map(len, sample)) <= 8000
    numbers = [int(text.split()[0]) for text in sample]
    assert min(numbers) < 60
    assert max(numbers) > 240
    build_corpus(replace(config, tokenizer=TokenizerConfig(kind="bytes")))
    held_out = documents_of(config.output / "validation")
    assert not {f"d{number}" for number in numbers} & set(held_out)


def test_unusable_records_are_listed_and_too_many_stop_the_build_without_a_corpus(tmp_path):
    config = config_of(tmp_path, some_texts(40))
    with open(config.input[0], "ab") as file:
        file.write(b'{"text": 3}\nnonsense\n{"text": "good"}\n')
    with pytest.raises(DataError, match=r"max_rejects=1 .*:42"):
        build_corpus(replace(config, max_rejects=1))
    assert not list(config.output.rglob(MANIFEST_NAME))
    assert build_corpus(replace(config, max_rejects=2)).rejects == 2
    listed = (config.output / "rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["source"] for line in listed] == ["x.jsonl:41", "x.jsonl:42"]
    splits = [documents_of(config.output / split) for split in ("train", "validation")]
    assert sum("x.jsonl:43" in split for split in splits) == 1


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_an_empty_corpus_is_rejected(tmp_path, kind, content):
    config = config_of(tmp_path, [], tokenizer=TokenizerConfig(kind=kind, vocab_size=300))
    config.input[0].write_text(content)
    with pytest.raises(DataError):
        build_corpus(config)
    assert not list(config.output.rglob(MANIFEST_NAME))


@pytest.mark.parametrize(("count", "size", "taken"), [(38, 300_000, 3), (80, 60_000, 7), (2, 9, 1)])
def test_a_folder_without_validation_documents_gives_some_whole_ones(tmp_path, count, size, taken):
    texts = [f"{number} ".ljust(size, ".") for number in range(count)]
    config = config_of(tmp_path, texts, validation_fraction=1e-9)
    notes: list[str] = []
    manifests = build_corpus(
        config, lambda what: notes.append(what.text if isinstance(what, Note) else "")
    ).manifests
    assert manifests["validation"].documents == taken
    assert manifests["train"].documents == count - taken
    names = sorted(documents_of(config.output / "validation"))
    said = next(note for note in notes if "validation split" in note)
    assert sorted(said.rpartition(": ")[2].split(", ")) == names
    assert build_corpus(config).was_finished, "of the settings that were asked for"


def test_a_validation_split_without_documents_is_rejected_with_what_to_change(tmp_path):
    config = config_of(tmp_path, some_texts(5), validation_fraction=0.437)
    with pytest.raises(DataError, match=r"0\.438"):
        build_in_processes(config, 2)
    empty = write_jsonl(tmp_path / "empty.jsonl", [" "])
    with pytest.raises(DataError, match=r"validation_input=.*/empty\.jsonl"):
        build_corpus(replace(config, validation_input=(empty,)))
    assert not list(config.output.rglob(MANIFEST_NAME))
    assert build_corpus(config).manifests["validation"].documents == 1


def test_building_again_changes_nothing_and_other_settings_are_rejected(tmp_path):
    config = config_of(tmp_path, some_texts())
    build_corpus(config)
    before = contents(config.output)
    assert build_corpus(replace(config, threads=2, max_rejects=7)).was_finished
    assert contents(config.output) == before
    with pytest.raises(ConfigError, match=f"shard_bytes {config.shard_bytes} -> 4000"):
        build_corpus(replace(config, shard_bytes=4000))
    with open(config.input[0], "a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(ConfigError):
        build_corpus(config)
    assert contents(config.output) == before


def test_a_directory_with_other_files_is_not_touched(tmp_path):
    config = config_of(tmp_path, some_texts(10))
    config.output.mkdir()
    (config.output / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError):
        build_corpus(config)
    assert contents(config.output) == {"thesis.tex": b"precious"}


def test_a_text_is_cut_after_a_paragraph_else_a_line_else_a_word(tmp_path):
    parts = [["one two\n\n", "three\nfour"], ["one two\n", "three four"], ["one two ", "threes"]]
    parts.append(["onetwothreefo", "ur"])
    texts = ["".join(each) for each in parts]
    config = config_of(tmp_path, texts, split_characters=13, validation_fraction=0.0)
    build_corpus(config)
    expected = {f"d{n}#{k}": p for n, of_text in enumerate(parts) for k, p in enumerate(of_text, 1)}
    assert documents_of(config.output / "train") == expected


def test_long_documents_become_numbered_parts_in_one_split(tmp_path):
    texts = some_texts(40)
    build_corpus(config_of(tmp_path, texts, split_characters=150))
    splits = [documents_of(tmp_path / "out" / split) for split in ("train", "validation")]
    for number, text in enumerate(texts):
        names = [f"d{number}#{part}" for part in range(1, 100)]
        names = names if len(text) > 150 else [f"d{number}"]
        assert names[0] in splits[0] or names[0] in splits[1]
        found = ("".join(split.get(name, "") for name in names) for split in splits)
        assert sorted(found) == ["", text]


def test_carriage_returns_are_kept_and_on_demand_made_newlines(tmp_path):
    texts = ["one\r\ntwo\r\n", "one\rtwo", "a\r\nb\rc", "plain\n", *some_texts(20)]
    config = config_of(tmp_path, texts, validation_fraction=0.0)
    flags = ["--input", str(config.input[0]), "tokenizer.kind=bytes", "validation_fraction=0"]
    assert main(["build", *flags, "--output", str(tmp_path / "kept")]) == 0
    kept = documents_of(tmp_path / "kept" / "train")
    assert [kept[f"d{number}"] for number in range(24)] == texts
    arguments = [*flags, "--output", str(tmp_path / "made"), "newlines=normalize"]
    assert main(["build", *arguments]) == 0
    made = documents_of(tmp_path / "made" / "train")
    assert [made[f"d{number}"] for number in range(3)] == ["one\ntwo\n", "one\ntwo", "a\nb\nc"]
    assert made["d4"] == kept["d4"]
