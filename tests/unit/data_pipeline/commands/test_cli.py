import json
import subprocess
import sys
from importlib import metadata

import pytest

from data_pipeline.cli import main
from data_pipeline.corpora.corpus import Corpus
from tests.helpers.corpora import contents, make_tiny_corpus, some_texts, write_jsonl


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_tiny_corpus(tmp_path_factory.mktemp("cli") / "corpus")


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_flags_win_over_overrides_and_overrides_over_the_config_file(tmp_path, capsys):
    source = write_jsonl(tmp_path / "x.jsonl", some_texts())
    base, own, output = tmp_path / "base.yaml", tmp_path / "c.yaml", tmp_path / "out"
    base.write_text("shard_bytes: 9000\nvalidation_fraction: 0.5\ntokenizer: {kind: bpe}\n")
    own.write_text(f"extends: base.yaml\ninput: {source}\ntokenizer: {{vocab_size: 320}}\n")
    overrides = ["shard_bytes=2000", "output=elsewhere", "validation_fraction=1e-1", "threads=1"]
    status, out, _ = run(capsys, "build", own, *overrides, "--output", output)
    assert status == 0
    corpus = Corpus.open(output / "train")
    assert corpus.manifest.vocab_size == 320
    assert max(shard.size for shard in corpus.manifest.shards) < 2500
    assert 60 < corpus.num_documents < 80
    assert f"{corpus.num_documents} documents" in out


def test_input_may_be_repeated_and_takes_paths_and_overrides_in_any_order(tmp_path, capsys):
    folder = tmp_path / "year=2020"
    folder.mkdir()
    sources = [folder / "x.jsonl", tmp_path / "y.jsonl"]
    for source in sources:
        write_jsonl(source, some_texts())
    long = f"id_field={300 * 'x'}"  # longer than a file name may be
    words = ["--input", sources[0], "tokenizer.kind=bytes", "--input", "validation_fraction=0"]
    output = tmp_path / "out"
    status, _, _ = run(capsys, "build", *words, long, sources[1], "--output", output)
    assert status == 0
    assert Corpus.open(output / "train").num_documents == 2 * len(some_texts())
    status, _, error = run(capsys, "build", *words, tmp_path / "year=2021", "--output", output)
    assert (status, f"{tmp_path}/year=2021" in error) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["build"], "--input"),
        (["build", "--output=o"], "--input"),
        (["build", "--input=nowhere", "--output=o"], "nowhere"),
        (["build", "--input=s3://bucket/x", "--output=o"], "copy it first"),
        (["build", "--input=i", "--output=o", "suffixes=[.zip]"], ".zip"),
        (["build", "nowhere.yaml"], "nowhere.yaml"),
        (["build", "i", "--output=o"], "i is a"),
        (["build", "--input=i", "--output=o", "shard_byte=3"], "'shard_bytes'"),
        (["build", "--input=i", "--output=o", "threads=many"], "threads"),
        (["build", "--input=i", "--output=o", "tokenizer.path=bpx"], "bpx"),
        (["build", "--input=i", "--output=o", "validation_fraction=2"], "validation_fraction"),
        (["build", "--input=i", "--output=o", "--part=0/0"], "0 of 0"),
        (["build", "--input=i", "--output=o", "--processes=9999"], "--processes"),
        (["inspect", "ftp://host/c"], "ftp://host/c"),
        (["verify", "nowhere"], "nowhere"),
        (["inspect", "i"], "manifest.json"),
        (["audit", "nowhere", "--lanes=4"], "nowhere"),
    ],
)
def test_a_users_mistake_is_a_line_without_files(tmp_path, capsys, monkeypatch, arguments, culprit):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "a.txt").write_text("some text")
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert culprit in err
    assert "Traceback" not in err
    assert list(contents(tmp_path)) == ["i/a.txt"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lanes=6", "--ranks=4"],
        ["--lanes=0"],
        ["--segment-length=10T"],
        ["--lanes=4000"],
        ["--steps=all"],
        ["--steps=7:7"],
        ["--lanes=4", "--lane=4"],
        ["--mix=books"],
    ],
)
def test_impossible_lanes_are_rejected(corpus, capsys, arguments):
    status, _, err = run(capsys, "audit", corpus, *arguments)
    assert status == 2
    assert arguments[-1].partition("=")[2].removesuffix("T") in err
    assert "Traceback" not in err


def test_inspect_shows_sizes_tokenizer_lanes_and_text(corpus, capsys):
    assert run(capsys, "verify", corpus / "train")[0] == 0
    status, out, _ = run(capsys, "inspect", corpus)
    assert status == 0, "by default the corpus is cut into as many lanes as it fills"
    status, out, _ = run(capsys, "inspect", corpus, "--lanes=4")
    assert status == 0
    train = Corpus.open(corpus / "train")
    sizes = (f"{train.num_tokens:,}", f"{train.num_bytes:,} bytes", "257 ids", "4 of ")
    for part in (*sizes, train.manifest.hash[:16]):
        assert part in out
    assert "waited for" in out or "carried" in out or "followed" in out
    assert out.count("  sample") == 2
    assert out.count("  lanes") == 1, "a validation split is not cut into the run's lanes"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train/shard.00001.mds", lambda c: c[:-1] + bytes([c[-1] ^ 1])),
        ("train/shard.00000.mds", lambda c: c[:-3]),
        ("validation/shard.00000.mds", None),
        ("train/manifest.json", lambda c: c.replace(b'"tokens": ', b'"tokens": 1', 1)),
        ("tokenizer/tokenizer.json", None),
        ("tokenizer/tokenizer.json", lambda c: c.replace(b"bytes", b"bpe")),
    ],
)
def test_verify_names_what_is_corrupted(tmp_path, capsys, name, damage):
    corpus = make_tiny_corpus(tmp_path / "corpus")
    content = (corpus / name).read_bytes()
    (corpus / name).unlink()
    if damage:
        assert damage(content) != content
        (corpus / name).write_bytes(damage(content))
    status, out, err = run(capsys, "verify", corpus)
    assert status == 2
    assert name.partition("/")[0] in err
    assert name.rpartition("/")[2].partition(".json")[0] in err
    assert "every shard" not in out


@pytest.mark.parametrize(
    ("package", "command", "lighter", "most_modules"),
    [
        ("data_pipeline", "", ["numpy", "yaml"], 200),
        ("data_pipeline", "build", ["yaml"], 500),
        ("data_pipeline", "audit", ["yaml"], 500),
        ("launcher", "local", ["numpy"], 500),
        ("launcher", "submit", ["numpy"], 500),
    ],
)
def test_help_imports_nothing_heavy(package, command, lighter, most_modules):
    heavy = ["torch", "deepspeed", "streaming", "sentencepiece", "pydantic", *lighter]
    code = (
        f"import sys; from {package}.cli import main\n"
        f"try: main({[command, '--help'] if command else ['--help']!r})\n"
        "except SystemExit: pass\n"
        f"found = set({heavy!r}) & set(sys.modules)\n"
        f"found = found or (len(sys.modules) > {most_modules} and len(sys.modules))\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {package.replace('_', '-')} {command}")


@pytest.mark.parametrize("program", ["data-pipeline", "pretrain", "launcher"])
def test_every_program_names_its_version_and_torchs_without_importing_it(program):
    module = program.replace("-", "_")
    code = f"import sys; from {module}.cli import PROGRAM\n"
    code += 'assert PROGRAM.main(["--version"]) == 0\nassert "torch" not in sys.modules'
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.startswith(f"{program} {metadata.version('xl-pretrain')}")
    for name in ("torch", "deepspeed"):
        assert f", {name} {metadata.version(name)}" in output


@pytest.mark.parametrize("package", ["data_pipeline", "pretrain", "launcher"])
def test_ctrl_c_while_a_program_imports_its_modules_is_one_line(package):
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'argparse': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"import {package}.cli"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_reading_a_corpus_needs_neither_torch_nor_streaming(corpus):
    code = (
        "import sys; from pathlib import Path\n"
        "from data_pipeline.corpora.corpus import Corpus\n"
        "from data_pipeline.lanes.lane_stream import LaneStream\n"
        "import data_pipeline.builder.build_corpus, data_pipeline.commands.verify\n"
        "import data_pipeline.commands.audit, data_pipeline.lanes.lane_stream\n"
        f"corpus = Corpus.open(Path({str(corpus / 'train')!r}))\n"
        "next(LaneStream(corpus, 2, 1, 8, range(2))).cursor\n"
        "heavy = {'torch', 'streaming', 'pretrain', 'launcher'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_split_that_has_lost_its_manifest_is_not_an_absent_split(tmp_path, capsys, command):
    corpus = make_tiny_corpus(tmp_path / "corpus")
    (corpus / "validation" / "manifest.json").unlink()
    status, out, err = run(capsys, command, corpus)
    assert (status, out) == (2, "")
    assert f"{corpus}/validation" in err


def test_inspect_and_audit_pass_no_control_characters_of_a_corpus_to_the_terminal(tmp_path, capsys):
    record = {"id": "\x1b[2J\x1b]0;title\x07\nd0", "text": "\x1b[31mred\x9b\r\u202e"}
    (tmp_path / "x.jsonl").write_text(json.dumps(record))
    corpus = tmp_path / "corpus"
    build = ["build", "--input", tmp_path / "x.jsonl", "--output", corpus, "tokenizer.kind=bytes"]
    assert run(capsys, *build, "validation_fraction=0")[0] == 0
    for command in (["inspect", corpus, "--lanes=1"], ["audit", corpus, "--lanes=1"]):
        status, out, _ = run(capsys, *command)
        assert status == 0
        assert "u001b[2J" in out
        assert out.replace("\n", "").replace("\t", "").isprintable()
