from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.builder.build_tokenizer import make_tokenizer, train_tokenizer
from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import Tokenizer, fingerprint_of
from foundation.errors import EXIT_INTERRUPTED, ConfigError, DataError
from tests.helpers.corpora import make_text, users_model

KINDS = ("unigram", "bpe", "bytes")


def texts_for_training() -> list[str]:
    generator = random.Random(4)
    return [make_text(generator, 12) + "\n\n  indented:\n\treturn 0\n" for _ in range(60)]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {
        kind: make_tokenizer(
            TokenizerConfig(kind=kind, vocab_size=320 if kind == "unigram" else 400),
            texts_for_training(),
        )
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(
    text=st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=200
    )
)
def test_decoding_gives_the_text_back_and_no_token_is_the_end(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.end_id, *ids, 10**6]) == text
    assert tokenizer.end_id not in ids
    assert ids.dtype == np.uint16
    assert (ids < tokenizer.vocab_size).all()


@pytest.mark.parametrize("kind", KINDS)
def test_many_texts_on_threads_give_what_one_at_a_time_gives(tokenizers, kind):
    texts = ["", *texts_for_training()]
    many = tokenizers[kind].encode_many(texts, num_threads=3)
    assert [ids.tolist() for ids in many] == [
        tokenizers[kind].encode(text).tolist() for text in texts
    ]


def long_text() -> str:
    line = " ".join(texts_for_training()).replace("\n", " ")[:5000]
    return "\n".join([line] * 40) + "\n\n\n" + line  # several times what is encoded at a time


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_long_text_has_the_tokens_that_the_model_alone_gives(tokenizers, kind):
    text, tokenizer = long_text(), tokenizers[kind]
    assert tokenizer.encode(text).tolist() == tokenizer.vocabulary.processor.encode(text)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_users_model_that_adds_a_space_at_the_start_adds_no_other(tmp_path, model_type):
    path = tmp_path / "m.model"
    path.write_bytes(users_model(texts_for_training(), model_type, remove_extra_whitespaces=False))
    tokenizer, text = Tokenizer.load(path), long_text()
    assert tokenizer.encode(text).tolist() == tokenizer.vocabulary.processor.encode(text)
    tokenizer.save(tmp_path / "saved")
    assert (
        Tokenizer.load(tmp_path / "saved").encode(text).tolist() == tokenizer.encode(text).tolist()
    ), "also as a directory"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_is_repeatable(tokenizers, kind):
    again = train_tokenizer(kind, 320 if kind == "unigram" else 400, texts_for_training())
    assert again.fingerprint == tokenizers[kind].fingerprint
    other = train_tokenizer(kind, 320 if kind == "unigram" else 400, texts_for_training()[1:])
    assert other.fingerprint != again.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_loads_as_the_same(tokenizers, kind, tmp_path):
    tokenizers[kind].save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizers[kind].fingerprint
    assert (loaded.kind, loaded.vocab_size, loaded.end_id) == (
        kind,
        tokenizers[kind].vocab_size,
        tokenizers[kind].end_id,
    )


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


def test_a_model_beside_a_tokenizer_of_bytes_is_refused_and_saving_one_removes_it(
    tokenizers, tmp_path
):
    tokenizers["bpe"].save(tmp_path)
    tokenizers["bytes"].save(tmp_path)
    assert Tokenizer.load(tmp_path).kind == "bytes"
    (tmp_path / "tokenizer.model").write_bytes(tokenizers["bpe"].model)
    with pytest.raises(DataError, match=r"tokenizer\.model"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_too_large_for_the_text_is_rejected_with_the_size_that_fits():
    with pytest.raises(ConfigError, match="vocab_size=30000") as caught:
        train_tokenizer("unigram", 30000, texts_for_training())
    fitting = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert train_tokenizer("unigram", fitting, texts_for_training()).vocab_size == fitting
    for kind, size, texts in (("unigram", 320, ["abc"]), ("bpe", 30000, texts_for_training())):
        with pytest.raises(ConfigError, match=f"vocab_size={size}"):
            train_tokenizer(kind, size, texts)


def test_an_error_of_reading_the_texts_is_not_replaced_by_advice_on_the_vocabulary():
    def texts():
        yield "some text"
        raise DataError("x.gz is cut off")

    with pytest.raises(DataError, match=r"^x\.gz is cut off$"):
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
    command = [sys.executable, "-c", TRAINING, str(pause)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
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
