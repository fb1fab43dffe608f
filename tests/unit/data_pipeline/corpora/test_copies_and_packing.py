"""Copies of validation documents in the training split, and what packing would lose."""

import numpy as np
import pytest

from data_pipeline import cli
from data_pipeline.corpora.packing import packing_losses
from tests.helpers.corpora import write_jsonl


def test_copies_of_validation_texts_in_training_are_counted(tmp_path, capsys):
    train = write_jsonl(tmp_path / "train.jsonl", ["one", "two", "two", "three"])
    held_out = write_jsonl(tmp_path / "held.jsonl", ["two", "four", "one more"])
    words = ["build", "--input", str(train), "--output", str(tmp_path / "out")]
    words += [f"validation_input=[{held_out}]", "tokenizer.kind=bytes"]
    assert cli.main(words) == 0
    assert "2 training documents are copies" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "out"), "--packing", "4", "--lanes", "1"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["concatenated", "1", "2", "0"] in table  # 4 + 4 + 4 + 6 tokens
    assert ["padded", "1", "0", "2"] in table


@pytest.mark.parametrize("length", [1, 3, 7, 100])
def test_losses_of_packing_are_those_of_the_samples_written_out(length):
    generator = np.random.default_rng(length)
    shards = [generator.integers(1, 20, 30) for _ in range(3)]
    lengths = [int(value) for shard in shards for value in shard]
    stream = [number for number, size in enumerate(lengths) for _ in range(size)]
    samples = [stream[at : at + length] for at in range(0, len(stream), length)]
    within = sum(
        any(sample.count(n) == size for sample in samples) for n, size in enumerate(lengths)
    )
    found = {loss.loader: loss for loss in packing_losses(shards, length)}
    assert found["concatenated"].documents_cut == len(lengths) - within
    assert found["concatenated"].tokens_lost == len(samples[-1]) % length
    assert found["cropped"].tokens_lost == sum(len(range(length, size)) for size in lengths)
    padded = sum(length * len(range(0, size, length)) for size in lengths)
    assert found["padded"].padding == padded - len(stream)
    assert found["padded"].documents_cut == sum(size > length for size in lengths)
