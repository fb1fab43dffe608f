"""Tokenizers, our own and those of other systems, compared with what their libraries give."""

import base64
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.build_tokenizer import make_tokenizer, train_tokenizer
from data_pipeline.builder.given_tokenizer import given_tokenizer
from data_pipeline.config import TokenizerConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.tokenizer import Tokenizer, fingerprint_of, read_fingerprint
from data_pipeline.vocabularies import confined
from foundation.errors import EXIT_INTERRUPTED, ConfigError, DataError
from tests.helpers.corpora import (
    config_of,
    documents_of,
    make_text,
    some_texts,
    stored,
    users_model,
)
from tests.helpers.tokenizer_files import END, byte_level_json, llama_like_json, tiktoken_file

OWN = ("unigram", "bpe", "bytes")
KINDS = ("byte-level json", "llama json", "tiktoken", "sentencepiece")
NASTY = f"a {END} b</s>c \u00e9\u2028\n\n\r\n  x\t\U0001f600 \u0301 {'long ' * 50}"


def texts_for_training() -> list[str]:
    generator = random.Random(4)
    return [make_text(generator, 12) + "\n\n  indented:\n\treturn 0\n" for _ in range(60)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, tuple[Path, TokenizerConfig]]:
    """kind -> its file, and the settings that it needs."""
    home, texts = tmp_path_factory.mktemp("files"), texts_for_training()
    (home / "hf").mkdir()
    (home / "hf" / "tokenizer.json").write_text(byte_level_json(texts))
    (home / "llama.json").write_text(llama_like_json(texts))
    needed = tiktoken_file(texts, home / "ranks.tiktoken")
    (home / "m.model").write_bytes(users_model(texts, user_defined_symbols=["<end>"]))
    return {
        "byte-level json": (home / "hf", TokenizerConfig()),
        "llama json": (home / "llama.json", TokenizerConfig()),
        "tiktoken": (home / "ranks.tiktoken", TokenizerConfig(**needed)),
        "sentencepiece": (home / "m.model", TokenizerConfig()),
    }


@pytest.fixture(scope="module")
def tokenizers(files) -> dict[str, Tokenizer]:
    sizes = dict(zip(OWN, (320, 400, 400), strict=True))
    own = {
        kind: make_tokenizer(TokenizerConfig(kind=kind, vocab_size=size), texts_for_training())
        for kind, size in sizes.items()
    }
    return own | {kind: given_tokenizer(*each).load() for kind, each in files.items()}


def ids_of_the_library(files, kind: str, text: str) -> list[int]:
    """The ids that the tokenizer's own library gives, with names of special tokens as text."""
    path, config = files[kind]
    if kind == "tiktoken":
        import tiktoken

        lines = map(bytes.split, path.read_bytes().splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        pattern, special = config.pattern, config.special_tokens
        encoding = tiktoken.Encoding(
            "x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        return encoding.encode_ordinary(text)
    if kind == "sentencepiece":
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(text)
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    library.encode_special_tokens = True
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_tokenizers_own_library(files, tokenizers, kind):
    for text in ("", "The river carried a silver key.", NASTY):
        expected = ids_of_the_library(files, kind, text)
        assert tokenizers[kind].encode(text).tolist() == expected


@pytest.mark.parametrize("kind", [*OWN, "byte-level json", "llama json", "tiktoken"])
@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_decoding_gives_the_text_back_and_no_token_is_the_end(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text + END)
    assert tokenizer.decode([tokenizer.end_id, *ids, 10**6]) == text + END
    assert tokenizer.end_id not in ids
    assert (ids < tokenizer.vocab_size).all()


@pytest.mark.parametrize("kind", [*OWN, *KINDS])
def test_a_saved_tokenizer_encodes_as_its_file_with_any_threads(tokenizers, kind, tmp_path):
    tokenizers[kind].save(tmp_path)
    loaded, texts = Tokenizer.load(tmp_path), [*texts_for_training(), NASTY, ""]
    assert loaded.fingerprint == tokenizers[kind].fingerprint == read_fingerprint(tmp_path)
    found = loaded.encode_many(texts, num_threads=3)
    expected = [tokenizers[kind].encode(text).tolist() for text in texts]
    assert [ids.tolist() for ids in found] == expected
    assert {ids.dtype for ids in found} == {np.dtype(np.uint16)}


@pytest.mark.parametrize("kind", ["byte-level json", "tiktoken"])
def test_sizes_of_tokens_add_up_to_those_of_the_text(tokenizers, kind):
    text = NASTY
    bytes_V, characters_V = tokenizers[kind].text_sizes()
    ids = tokenizers[kind].encode(text)
    assert bytes_V[ids].sum() == len(text.encode())
    assert characters_V[ids].sum() == len(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_is_built_with_it_loaded_once_and_gives_its_texts_back(
    files, kind, tmp_path, monkeypatch
):
    path, config = files[kind]
    texts = texts_for_training()[:12]
    given = replace(config, path=path)
    notes: list[object] = []
    starts: list[object] = []
    start = confined.ConfinedVocabulary._start
    monkeypatch.setattr(
        confined.ConfinedVocabulary, "_start", lambda self: start(self) or starts.append(self)
    )
    build_corpus(config_of(tmp_path, texts, tokenizer=given), notes.append)
    assert len(starts) == 1
    is_altered = any("alters texts" in str(note) for note in notes)
    found = documents_of(tmp_path / "out" / "train")
    if kind == "sentencepiece":  # its own normalization makes one space of a newline
        found, texts = {}, []
        assert is_altered
    else:
        assert not is_altered
        assert set(found.values()) < set(texts)


def test_the_end_of_a_document_follows_from_the_files_beside_or_the_setting(files, tmp_path):
    content = (files["byte-level json"][0] / "tokenizer.json").read_text()
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    assert given_tokenizer(tmp_path, TokenizerConfig()).load().options == {"end_token": END}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "the"}}))
    with pytest.raises(DataError, match="'the'"):
        given_tokenizer(tmp_path, TokenizerConfig()).load()
    named = given_tokenizer(tmp_path, TokenizerConfig(end_token=END)).load()
    assert named.decode([named.end_id]) == ""
    path.write_text(content.replace(END, "<bye>"))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.end"):
        given_tokenizer(path, TokenizerConfig()).load()


def test_a_piece_may_end_documents_that_do_not_contain_it(files):
    tokenizer = given_tokenizer(
        files["sentencepiece"][0], TokenizerConfig(end_token="<end>")
    ).load()
    assert tokenizer.encode("the river").size
    with pytest.raises(DataError, match=str(tokenizer.end_id)):
        tokenizer.encode("the <end> river")


def test_the_fingerprint_tells_options_apart(tokenizers):
    given = tokenizers["tiktoken"]
    model, options = given.model, given.options
    assert fingerprint_of("tiktoken", model, options) == given.fingerprint
    assert fingerprint_of("tiktoken", model, {**options, "pattern": "."}) != given.fingerprint
    assert fingerprint_of("bpe", model) == fingerprint_of("bpe", model, {})


@pytest.mark.parametrize("pattern", ["", "a*", r"(?<=\.)"])
def test_a_pattern_that_cuts_empty_pieces_out_of_a_text_is_refused(tokenizers, pattern):
    given = tokenizers["tiktoken"]
    with pytest.raises(DataError) as error:
        Tokenizer("tiktoken", given.model, {**given.options, "pattern": pattern}).encode("Ä. b")
    assert "\n" not in str(error.value)


def test_a_small_file_with_a_large_id_is_refused(files, tokenizers):
    tree = json.loads((files["byte-level json"][0] / "tokenizer.json").read_text())
    tree["model"]["vocab"]["zzz"] = 14_000_000
    ranks = tokenizers["tiktoken"]
    for kind, model, options in (
        ("huggingface", json.dumps(tree).encode(), {"end_token": END}),
        ("tiktoken", ranks.model + b"\nenp6 14000000\n", ranks.options),
    ):
        with pytest.raises(DataError, match="14,000,000"):
            Tokenizer(kind, model, options)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b'{"unknown","version"'),  # the library reads it, though it is no JSON
        ("x.tiktoken", b""),
        ("x.tiktoken", b"IQ== one\n"),
        ("x.tiktoken", b"IQ== 99999999\n"),
        ("x.tiktoken", b"!! 3\n"),
        ("without a pattern.tiktoken", b"garbage"),
        ("x.model", b"version https://git-lfs.github.com/spec/v1\nsize 9\n"),
    ],
)
def test_a_wrong_file_is_one_line(files, tmp_path, name, content):
    config = TokenizerConfig(end_token=END)
    if name == "x.tiktoken":
        config = replace(files["tiktoken"][1], end_token=END)
    if b"unknown" in content:
        right = (files["byte-level json"][0] / "tokenizer.json").read_bytes()
        content = right.replace(b'{"version"', content, 1)
    (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, ConfigError)) as error:
        given_tokenizer(tmp_path / name, config).load()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert ("git lfs pull" in str(error.value)) == (name == "x.model")


def test_a_folder_with_another_file_of_a_tokenizer_names_it(tmp_path):
    with pytest.raises(DataError, match="has no tokenizer"):
        given_tokenizer(tmp_path, TokenizerConfig())
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(DataError, match=r"; give .*/tokenizer\.model$"):
        given_tokenizer(tmp_path, TokenizerConfig())


def test_a_corpus_in_place_of_a_tokenizer_is_refused_with_the_tokenizer_in_it(tmp_path):
    Tokenizer("bytes").save(tmp_path / "tokenizer")
    with pytest.raises(DataError) as error:
        given_tokenizer(tmp_path, TokenizerConfig()).load()
    given = str(error.value).rpartition(", ")[2]
    assert given_tokenizer(Path(given), TokenizerConfig()).load().kind == "bytes"


@pytest.mark.parametrize(
    ("library", "kind", "extra", "options"),
    [
        ("tokenizers", "huggingface", "huggingface", {}),
        ("tiktoken", "tiktoken", "tiktoken", {"pattern": "a", "special_tokens": {}}),
    ],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, library, kind, extra, options):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"xl-pretrain\[{extra}\]'"):
        confined.KINDS[kind](b"{}", end_token="</s>", **options)


WORDS = TokenizerConfig(kind="words", vocab_size=10_000)
CHARACTERS = TokenizerConfig(kind="characters")
LINES = " = Title = \n\n the  cat sat .\n the dog sat .\n the cat ran .\n"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["the", "cat", "sat", "."]), max_size=4), min_size=1))
def test_words_come_back_with_one_space_between_them(lines):
    tokenizer = make_tokenizer(WORDS, [LINES])
    text = "\n".join("  ".join(line) for line in lines)
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalized(text)
    assert tokenizer.normalized(text).split() == text.split()


def test_a_word_outside_of_the_vocabulary_is_unknown_or_an_error():
    few = make_tokenizer(TokenizerConfig(kind="words", vocab_size=300), [f"{LINES} {range(9)}"])
    with pytest.raises(DataError, match="'bird'"):
        few.encode("the bird")
    counts = {f"w{number}": 400 - number for number in range(400)}
    text = " ".join(word for word, count in counts.items() for _ in range(count))
    small = make_tokenizer(TokenizerConfig(kind="words", vocab_size=300), [text])
    assert small.vocab_size == 300
    assert small.decode(small.encode("w0 w1\nw2 w399 w3")) == "w0 w1\nw2 <unk> w3"


def test_characters_are_the_bytes_that_occur_and_a_space_ends_a_document():
    text = "one caf\u00e9 two"
    tokenizer = make_tokenizer(CHARACTERS, [text])
    assert [*tokenizer.encode("one"), tokenizer.end_id] == tokenizer.encode("one ").tolist()
    with pytest.raises(DataError, match=f"byte {ord('x')}"):
        tokenizer.encode("x")


@pytest.mark.parametrize("config", [WORDS, CHARACTERS], ids=lambda config: config.kind)
def test_sizes_of_a_corpus_are_those_of_its_tokens(config, tmp_path):
    texts = [" ".join(text.split()) for text in some_texts(20)]
    settings = config_of(tmp_path, texts, tokenizer=config, validation_fraction=0)
    build_corpus(settings)
    corpus = Corpus.open(tmp_path / "out" / "train")
    bytes_V, characters_V = Tokenizer.load(corpus.tokenizer_directory).text_sizes()
    ids = [tokens for _, tokens in stored(corpus.directory)]
    assert sum(bytes_V[each].sum() for each in ids) == corpus.num_bytes
    assert sum(characters_V[each].sum() for each in ids) == corpus.num_characters
    assert corpus.num_bytes == sum(len(text) + 1 for text in texts)


def test_an_unknown_tokenizer_writes_ids():
    config = TokenizerConfig(kind="unknown", vocab_size=500, end_id=499)
    tokenizer = make_tokenizer(config, [])
    assert tokenizer.encode(" 7 12\n498 ").tolist() == [7, 12, 498]
    assert tokenizer.decode([7, 12, 499]) == "7 12 "
    for text in ("word", "500", "-1", "1" * 5000):
        with pytest.raises(DataError, match="500"):
            tokenizer.encode(text)
    with pytest.raises(DataError, match="499"):
        tokenizer.encode("499")
    with pytest.raises(ConfigError, match=r"tokenizer\.end_id"):
        make_tokenizer(TokenizerConfig(kind="unknown"), [])


def long_text() -> str:
    line = " ".join(texts_for_training()).replace("\n", " ")[:5000]
    return "\n".join([line] * 40) + "\n\n\n" + line  # several times what is encoded at a time


def model_alone(tokenizer: Tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_long_text_has_the_tokens_that_the_model_alone_gives(tokenizers, kind):
    text, tokenizer = long_text(), tokenizers[kind]
    assert tokenizer.encode(text).tolist() == model_alone(tokenizer).encode(text)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_users_model_that_adds_a_space_at_the_start_adds_no_other(tmp_path, model_type):
    path = tmp_path / "m.model"
    path.write_bytes(users_model(texts_for_training(), model_type, remove_extra_whitespaces=False))
    tokenizer, text = Tokenizer.load(path), long_text()
    assert tokenizer.encode(text).tolist() == model_alone(tokenizer).encode(text)
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist(), "also as a directory"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_is_repeatable(tokenizers, kind):
    again = train_tokenizer(kind, 320 if kind == "unigram" else 400, texts_for_training())
    assert again.fingerprint == tokenizers[kind].fingerprint
    other = train_tokenizer(kind, 320 if kind == "unigram" else 400, texts_for_training()[1:])
    assert other.fingerprint != again.fingerprint


@pytest.mark.parametrize("kind", ["pipe", "endless", "deep", "garbage", "no end", "altered"])
def test_a_forged_tokenizer_is_one_line(tokenizers, tmp_path, kind):
    tokenizers["bpe"].save(tmp_path)
    model, description = tmp_path / "tokenizer.model", tmp_path / "tokenizer.json"
    if kind in ("pipe", "endless"):
        model.unlink()
        os.mkfifo(model) if kind == "pipe" else model.symlink_to("/dev/zero")
    elif kind == "deep":
        description.write_text('{"kind": ' + "[" * 200_000)
    elif kind == "altered":
        content = model.read_bytes()
        model.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    else:
        content = b"\x0a\xff garbage" if kind == "garbage" else users_model(["a b c"], eos_id=-1)
        model.write_bytes(content)
        fingerprint = fingerprint_of("bpe", content)
        description.write_text(json.dumps({"kind": "bpe", "fingerprint": fingerprint}))
    with pytest.raises(DataError, match="tokenizer") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_file_that_is_no_model_of_sentencepiece_is_named(tmp_path):
    content, piece = users_model(["a b c"]), "\u2581b".encode()
    assert piece in content
    for wrong in (b"", b"not a model", content.replace(piece, piece[:-2] + b"\xffb")):
        (tmp_path / "m.model").write_bytes(wrong)
        with pytest.raises(DataError, match=r"m\.model"):
            Tokenizer.load(tmp_path / "m.model")


def test_a_model_beside_a_tokenizer_of_bytes_is_refused_and_saving_removes_it(tokenizers, tmp_path):
    tokenizers["bpe"].save(tmp_path)
    tokenizers["bytes"].save(tmp_path)
    assert Tokenizer.load(tmp_path).kind == "bytes"
    (tmp_path / "tokenizer.model").write_bytes(tokenizers["bpe"].model)
    with pytest.raises(DataError, match=r"tokenizer\.model"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_too_large_for_the_text_is_rejected_with_the_size_that_fits():
    with pytest.raises(ConfigError, match="vocab_size=30000") as caught:
        train_tokenizer("unigram", 30000, texts_for_training())
    fitting = int(str(caught.value).split("set it to ")[1].split(",")[0])
    assert train_tokenizer("unigram", fitting, texts_for_training()).vocab_size == fitting
    for kind, size, texts in (("unigram", 320, ["abc"]), ("bpe", 30000, texts_for_training())):
        with pytest.raises(ConfigError, match=f"vocab_size={size}"):
            train_tokenizer(kind, size, texts)


def test_an_error_of_reading_the_texts_is_not_replaced_by_advice_on_the_vocabulary():
    def texts():
        yield "some text"
        raise DataError("x.gz")

    with pytest.raises(DataError, match=r"^x\.gz$"):
        train_tokenizer("bpe", 300, texts())


TRAINING = """
import random, sys, time
from foundation.errors import exit_status_of
from data_pipeline.builder.build_tokenizer import make_tokenizer, train_tokenizer

def texts():
    for number in range(1000):
        print(number, flush=True)
        time.sleep(float(sys.argv[1]))
        yield "".join(random.Random(number).choices("abcdefgh ", k=4000))

sys.exit(exit_status_of(lambda: train_tokenizer("unigram", 8000, texts()) and 0))
"""


@pytest.mark.parametrize(
    ("last_read", "pause", "status"), [(3, 0.01, EXIT_INTERRUPTED), (999, 0.0, -signal.SIGINT)]
)
def test_ctrl_c_stops_reading_texts_and_training_on_them(last_read, pause, status):
    command, pipe = [sys.executable, "-c", TRAINING, str(pause)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert any(int(line) == last_read for line in process.stdout)
        time.sleep(0.3)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == status
    assert time.monotonic() - began < 30  # the training takes minutes
    assert error == ("interrupted\n" if status == EXIT_INTERRUPTED else "")


def test_training_restores_the_handler_of_ctrl_c():
    before = signal.getsignal(signal.SIGINT)
    train_tokenizer("bpe", 400, texts_for_training())
    assert signal.getsignal(signal.SIGINT) is before
