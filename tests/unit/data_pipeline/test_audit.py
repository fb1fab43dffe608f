from __future__ import annotations

import json
import shutil
from collections import defaultdict

import numpy as np
import pytest

from data_pipeline.cli import main
from data_pipeline.config import MixturePart
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import open_mixture
from tests.helpers.corpora import write_numbered_corpus

NUM_LANES, LENGTH, STEPS = 8, 16, 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    lengths = np.random.default_rng(2).integers(1, 50, (5, 40))
    return write_numbered_corpus(tmp_path_factory.mktemp("audited"), lengths.tolist())


def audited(capsys, corpus, *extra):
    sizes = [f"--lanes={NUM_LANES}", f"--segment-length={LENGTH}"]
    assert main(["audit", str(corpus.directory), *sizes, "--json", *extra]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_audit_lists_what_the_ranks_read(corpus, capsys, world_size):
    lines = audited(capsys, corpus, f"--steps=0:{STEPS}", "--seed=7", f"--ranks={world_size}")
    numbers = {shard.path: number for number, shard in enumerate(corpus.manifest.shards)}
    expected: dict[tuple[int, int], list[int]] = defaultdict(list)
    for piece in lines:
        tokens = corpus.shard(numbers[piece["shard"]]).tokens(
            piece["index"], piece["offset"], piece["tokens"]
        )
        expected[piece["step"], piece["lane"]] += tokens.tolist()
        assert piece["document"] == corpus.shard(numbers[piece["shard"]]).document_id(
            piece["index"]
        )
    per_rank = NUM_LANES // world_size
    for rank in range(world_size):
        lanes = range(rank * per_rank, (rank + 1) * per_rank)
        assert {piece["lane"] for piece in lines if piece["rank"] == rank} == set(lanes)
        stream = LaneStream(corpus, NUM_LANES, 7, LENGTH, lanes)
        for step in range(STEPS):
            batch = next(stream)
            for lane, tokens_L in zip(lanes, batch.tokens_BL, strict=True):
                assert expected[step, lane] == tokens_L.tolist()


def test_later_steps_or_one_lane_alone_are_a_part_of_the_full_audit(corpus, capsys):
    later = [each for each in audited(capsys, corpus, "--steps=0:500") if each["step"] >= 490]
    assert audited(capsys, corpus, "--steps=490:500") == later
    lane = [each for each in later if each["lane"] == 3]
    assert audited(capsys, corpus, "--steps=490:500", "--lane=3") == lane


def test_the_audit_reads_no_tokens(corpus, tmp_path, capsys):
    """Every token zeroed on disk, nothing else: the audit is the same."""
    lines = audited(capsys, corpus, "--steps=0:50")
    lengths = [corpus.document_lengths(number).tolist() for number in range(5)]
    copy = write_numbered_corpus(tmp_path, lengths)
    for number, shard in enumerate(copy.manifest.shards):
        reader = copy.shard(number)
        content = bytearray((tmp_path / shard.path).read_bytes())
        for start, length in zip(
            reader.token_offsets.tolist(), reader.lengths.tolist(), strict=True
        ):
            content[start : start + 4 * length] = bytes(4 * length)
        (tmp_path / shard.path).write_bytes(content)
    assert audited(capsys, copy, "--steps=0:50") == lines


def test_weights_are_those_of_the_runs_mixture(corpus, tmp_path, capsys):
    """The parts of a run's `data.mixture` with weights read what the audit says."""
    (tmp_path / "a").mkdir()
    shutil.copytree(corpus.directory, tmp_path / "a" / "train")
    write_numbered_corpus(tmp_path / "b" / "train", [[30, 7, 40], [12, 50]])
    weights = {"a": 5, "b": 1.0}
    mixture = open_mixture([MixturePart(path=tmp_path / n, weight=w) for n, w in weights.items()])
    assert mixture.repeats[0] == 1
    assert mixture.repeats[1] > 1
    stream = LaneStream(mixture, NUM_LANES, 1, LENGTH, range(NUM_LANES))
    mix = ["--repeat=5", f"--mix={tmp_path / 'b'}=1", "--weights"]
    sizes = [f"--lanes={NUM_LANES}", f"--segment-length={LENGTH}", "--steps=0:100"]
    arguments = ["--json", *sizes, *mix]
    assert main(["audit", str(tmp_path / "a"), *arguments]) == 0
    pieces = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    units = {shard.path: unit for unit, shard in enumerate(mixture.manifest.shards)}
    for step in range(100):
        read: dict[int, list[int]] = defaultdict(list)
        for piece in (piece for piece in pieces if piece["step"] == step):
            shard = mixture.shard(units[piece["shard"]])
            read[piece["lane"]] += shard.tokens(
                piece["index"], piece["offset"], piece["tokens"]
            ).tolist()
        assert [read[lane] for lane in range(NUM_LANES)] == next(stream).tokens_BL.tolist()
    assert main(["audit", str(tmp_path / "a"), *arguments, "--repeat=0"]) == 2
    assert main(["audit", str(tmp_path / "a"), f"--mix={tmp_path / 'b'}=nan"]) == 2
