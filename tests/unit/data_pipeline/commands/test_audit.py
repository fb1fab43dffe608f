import json
import shutil
from collections import defaultdict

import numpy as np
import pytest

from data_pipeline.cli import main
from data_pipeline.config import MixturePart
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import Mixture, open_mixture
from tests.helpers.corpora import write_numbered_corpus

NUM_LANES, LENGTH, STEPS = 8, 16, 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    lengths = np.random.default_rng(2).integers(1, 50, (5, 40))
    return write_numbered_corpus(tmp_path_factory.mktemp("audited"), lengths.tolist())


def audited(capsys, directory, *extra):
    sizes = [f"--lanes={NUM_LANES}", f"--segment-length={LENGTH}"]
    assert main(["audit", str(directory), *sizes, "--json", *extra]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def tokens_of(corpus: Corpus | Mixture, piece) -> list[int]:
    """What the audit says that a lane reads there, of a document that it names."""
    units = {shard.path: unit for unit, shard in enumerate(corpus.manifest.shards)}
    shard = corpus.shard(units[piece["shard"]])
    assert shard.document_id(piece["index"]) == piece["document"]
    return shard.tokens(piece["index"], piece["offset"], piece["tokens"]).tolist()


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_audit_lists_what_the_ranks_read(corpus, capsys, world_size):
    flags = [f"--steps=0:{STEPS}", "--seed=7", f"--ranks={world_size}"]
    lines = audited(capsys, corpus.directory, *flags)
    expected: dict[tuple[int, int], list[int]] = defaultdict(list)
    for piece in lines:
        expected[piece["step"], piece["lane"]] += tokens_of(corpus, piece)
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
    whole = audited(capsys, corpus.directory, "--steps=0:500")
    later = [each for each in whole if each["step"] >= 490]
    assert audited(capsys, corpus.directory, "--steps=490:500") == later
    lane = [each for each in later if each["lane"] == 3]
    assert audited(capsys, corpus.directory, "--steps=490:500", "--lane=3") == lane


def test_the_audit_reads_no_tokens(corpus, tmp_path, capsys):
    """Every token zeroed on disk, nothing else: the audit is the same."""
    lines = audited(capsys, corpus.directory, "--steps=0:50")
    lengths = [corpus.document_lengths(number).tolist() for number in range(5)]
    copy = write_numbered_corpus(tmp_path, lengths)
    for number, shard in enumerate(copy.manifest.shards):
        reader = copy.shard(number)
        content = bytearray((tmp_path / shard.path).read_bytes())
        for start, length in zip(reader.token_offsets, reader.lengths, strict=True):
            content[start : start + 4 * length] = bytes(4 * int(length))
        (tmp_path / shard.path).write_bytes(content)
    assert audited(capsys, copy.directory, "--steps=0:50") == lines


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
    read: dict[tuple[int, int], list[int]] = defaultdict(list)
    for piece in audited(capsys, tmp_path / "a", "--steps=0:100", *mix):
        read[piece["step"], piece["lane"]] += tokens_of(mixture, piece)
    for step in range(100):
        assert [read[step, lane] for lane in range(NUM_LANES)] == next(stream).tokens_BL.tolist()
    audit = ["audit", str(tmp_path / "a"), f"--lanes={NUM_LANES}"]
    assert main([*audit, *mix, "--repeat=0"]) == 2
    assert main([*audit, f"--mix={tmp_path / 'b'}=nan"]) == 2
