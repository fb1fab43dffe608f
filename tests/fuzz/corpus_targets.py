"""Files of corpora, and the texts that they are built of."""

import hashlib
import io
import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from data_pipeline import cli as data_pipeline
from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.builder.build_tokenizer import make_tokenizer, train_tokenizer
from data_pipeline.builder.given_tokenizer import given_tokenizer
from data_pipeline.config import CacheConfig, CorpusConfig, TokenizerConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.lengths import HASH_BYTES, HEADER_BYTES, lengths_content
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.corpora.remote_corpus import CachedShards, local_corpus_directory
from data_pipeline.corpora.shard_cache import ShardCache
from data_pipeline.corpora.stores import store_at
from data_pipeline.corpora.web_requests import RetryPolicy
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.mixture import Mixture, open_training_data
from data_pipeline.tokenizer import DESCRIPTION_NAME, MODEL_NAME, Tokenizer, fingerprint_of
from foundation.files import sha256_of
from tests.fuzz.mutations import json_text
from tests.fuzz.target import Target, command, parse_lines, write_lines
from tests.helpers.corpora import config_of, make_text, some_texts
from tests.helpers.stores import FileServer
from tests.helpers.token_files import make_input
from tests.helpers.tokenizer_files import END, byte_level_json, tiktoken_file

CHECKED_TEXT = "The river carried a silver key."
SEGMENTS = 12  # that a reader of a corpus reads
IMPATIENT = RetryPolicy(attempts=2, timeout=1.0, pause=0.01, bytes_per_second=1e6)


def corpus_targets(corpus: Path) -> dict[str, Target]:
    manifest = Target(corpus, "train/manifest.json", _read_corpus, seal=_seal_manifest)
    tokenizer = Target(corpus, "tokenizer/tokenizer.json", _read_corpus)
    inspect = partial(command, data_pipeline.main, "inspect")
    return {
        "manifest": manifest,
        "manifest over HTTP": _over_http(manifest),
        "tokenizer": tokenizer,
        "tokenizer over HTTP": _over_http(tokenizer),
        "corpus as JSON": Target(corpus, "build.json", inspect),
    }


def _over_http(target: Target) -> Target:
    return replace(target, read=_read_remote_corpus, seconds=0.1)


def shard_targets(directory: Path, corpus: Path) -> dict[str, Target]:
    tars = config_of(directory / "tars", some_texts(12), shard_format="webdataset")
    build_corpus(tars)
    mds, tar = "train/shard.00000.mds", "train/shard.00000.tar"
    name = f"{mds}.lengths"
    lengths = Target(corpus, name, _read_corpus, None, seal=_seal_lengths(name))
    return {
        "lengths": lengths,
        "lengths over HTTP": _over_http(lengths),
        "MDS shard": Target(corpus, mds, _read_corpus, None, seal=_seal_shard(mds)),
        "tar shard": Target(tars.output, tar, _read_corpus, None, seal=_seal_shard(tar)),
    }


def _read_corpus(copy: Path) -> str:
    command(data_pipeline.main, "verify", copy)
    command(data_pipeline.main, "inspect", copy)
    return _tokens_of_lanes(open_training_data(copy, (), CacheConfig()))


def _read_remote_corpus(copy: Path) -> str:
    """Fetch and read the corpus as training does, but give up earlier on a server."""
    config = CacheConfig(directory=copy.with_name("cache"), gib=1e-4)
    with FileServer(copy) as server:
        split = local_corpus_directory(Path(server.url), config, IMPATIENT) / "train"
        store = store_at(f"{server.url}/train", IMPATIENT)
        shards = CachedShards(store, ShardCache(config))
        return _tokens_of_lanes(Corpus(split, read_manifest(split), shards))


def _tokens_of_lanes(corpus: Corpus | Mixture) -> str:
    """Return the hash of the first tokens of two lanes."""
    stream = LaneStream(corpus, 2, 1, 16, range(2))
    digest = hashlib.sha256()
    for _ in range(SEGMENTS):
        digest.update(next(stream).tokens_BL.tobytes())
    return digest.hexdigest()


def _seal_manifest(copy: Path) -> None:
    path = copy / "train" / "manifest.json"
    tree = json.loads(path.read_bytes())
    content = {key: tree[key] for key in tree if key not in ("hash", "totals")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_bytes(json_text({**tree, "hash": hashlib.sha256(text.encode()).hexdigest()}))


def _seal_shard(name: str) -> Callable[[Path], None]:
    def seal(copy: Path) -> None:
        path, shard = copy / "train" / "manifest.json", copy / name
        tree = json.loads(path.read_bytes())
        entry = next(each for each in tree["shards"] if each["path"] == shard.name)
        lengths, sha256 = shard.with_name(f"{shard.name}.lengths"), sha256_of(shard)
        values = np.frombuffer(lengths.read_bytes()[HEADER_BYTES:], "<u4")
        lengths.write_bytes(lengths_content(sha256, values))
        entry |= {"size": shard.stat().st_size, "sha256": sha256, "lengths": sha256_of(lengths)}
        path.write_bytes(json_text(tree))
        _seal_manifest(copy)

    return seal


def _seal_lengths(name: str) -> Callable[[Path], None]:
    def seal(copy: Path) -> None:
        path, lengths = copy / "train" / "manifest.json", copy / name
        content, head = lengths.read_bytes(), HEADER_BYTES - HASH_BYTES
        values = content[HEADER_BYTES:]
        lengths.write_bytes(content[:head] + hashlib.sha256(values).digest() + values)
        tree = json.loads(path.read_bytes())
        entry = next(each for each in tree["shards"] if f"{each['path']}.lengths" == lengths.name)
        entry["lengths"] = sha256_of(lengths)
        path.write_bytes(json_text(tree))
        _seal_manifest(copy)

    return seal


def tokenizer_targets(directory: Path) -> dict[str, Target]:
    """Models of all kinds, and the options of one whose file does not say everything."""
    texts = [*some_texts(30), CHECKED_TEXT]
    (directory / "models").mkdir()
    ranks = directory / "models" / "x.tiktoken"
    given = TokenizerConfig(**tiktoken_file(texts, ranks))  # type: ignore[arg-type]
    options = {"end_token": END}
    tokenizers = {
        "SentencePiece model": train_tokenizer("unigram", 320, texts),
        "tokenizer.json": Tokenizer("huggingface", byte_level_json(texts).encode(), options),
        "tiktoken ranks": given_tokenizer(ranks, given).load(),
        "words": make_tokenizer(TokenizerConfig(kind="words"), texts),
        "characters": make_tokenizer(TokenizerConfig(kind="characters"), texts),
    }
    targets = {}
    for name, tokenizer in tokenizers.items():
        home = directory / "models" / name
        tokenizer.save(home)
        parse = json.loads if name == "tokenizer.json" else None
        targets[name] = Target(home, MODEL_NAME, _encode, parse, seal=_seal_tokenizer)
    home = directory / "models" / "tiktoken ranks"
    targets["tokenizer's options"] = Target(home, DESCRIPTION_NAME, _encode, seal=_seal_tokenizer)
    return targets


def _encode(copy: Path) -> object:
    tokenizer = Tokenizer.load(copy)
    tokens = tokenizer.encode(CHECKED_TEXT)
    return tokens.tolist(), tokenizer.decode(tokens), str(tokenizer.text_sizes())


def _seal_tokenizer(copy: Path) -> None:
    path = copy / DESCRIPTION_NAME
    tree = json.loads(path.read_bytes())
    if isinstance(tree, dict) and isinstance(tree.get("options", {}), dict):
        model = (copy / MODEL_NAME).read_bytes()
        found = fingerprint_of(str(tree.get("kind")), model, tree.get("options"))
        path.write_bytes(json_text({**tree, "fingerprint": found}))


def token_targets(directory: Path) -> dict[str, Target]:
    """Tokens and tables that a corpus is built of."""
    settings = {
        "megatron": {"format": "megatron"},
        "numpy": {"format": "array"},
        "arrow": {"text_field": "input_ids"},
        "mds of bytes": {"text_field": "tokens", "token_dtype": "int64"},
    }
    targets = {}
    for kind, changed in settings.items():
        home = directory / "tokens" / kind
        home.mkdir(parents=True)
        make_input(kind, home)
        patterns = {"megatron": "*.idx", "mds of bytes": "*.mds", "arrow": "*.arrow"}
        (path,) = home.glob(patterns.get(kind, "*"))
        name = path.with_suffix(".bin").name if path.suffix == ".idx" else path.name
        read = partial(_build_of, name, **changed)
        targets[f"tokens: {kind}"] = Target(home, path.name, read, None, is_protected=False)
    return targets


def list_targets(directory: Path) -> dict[str, Target]:
    """What a data set lists of itself, beside its files."""
    import datasets

    home = directory / "lists"
    for kind in ("arrow", "mds of bytes"):
        (home / kind).mkdir(parents=True)
        make_input(kind, home / kind)
    rows = datasets.Dataset.from_dict({"text": some_texts(4)})
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(home / "splits"))
    (home / "tars").mkdir()
    with tarfile.open(home / "tars" / "a.tar", "w") as archive:
        info = tarfile.TarInfo("0.txt")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"words"))
    index = {"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 1}]}
    (home / "tars" / "shardindex.json").write_text(json.dumps(index))
    (home / "card").mkdir()
    (home / "card" / "x.jsonl").write_bytes(write_lines([{"text": "words"}]))
    card = "---\nconfigs:\n- data_files:\n  - split: train\n    path: '**/*.jsonl'\n---\n"
    (home / "card" / "README.md").write_text(card)
    settings = {
        "arrow/state.json": {"text_field": "input_ids"},
        "mds of bytes/index.json": {"text_field": "tokens", "token_dtype": "int64"},
        "splits/dataset_dict.json": {"tokenizer": TokenizerConfig(kind="bytes")},
        "tars/shardindex.json": {"tokenizer": TokenizerConfig(kind="bytes")},
        "card/README.md": {"tokenizer": TokenizerConfig(kind="bytes")},
    }
    targets = {}
    for name, changed in settings.items():
        read = partial(_build_of, name.partition("/")[0], **changed)
        form = () if name.endswith(".json") else (None,)
        targets[f"list: {name}"] = Target(home, name, read, *form, is_protected=False)
    return targets


UNKNOWN = TokenizerConfig(kind="unknown", vocab_size=400, end_id=399)


def _build_of(name: str, copy: Path, **settings: Any) -> object:
    usual = {"validation_fraction": 0.0, "threads": 1, "tokenizer": UNKNOWN}
    paths = {"input": (copy / name,), "output": copy / "out"}
    return build_corpus(CorpusConfig(**paths, **usual | settings)).manifests["train"].tokens


def text_targets(directory: Path) -> dict[str, Target]:
    """Documents that a corpus is built of."""
    home = directory / "text"
    home.mkdir()
    generator = random.Random(0)
    records = [{"id": f"d{n}", "text": make_text(generator, 3)} for n in range(4)]
    text = write_lines(records)
    (home / "text.jsonl").write_bytes(text)
    (home / "text.jsonl.zst").write_bytes(zstandard.compress(text))
    (home / "text.txt").write_text(records[0]["text"])

    def target(name: str, *form: Any) -> Target:
        read = partial(_build_of, name, tokenizer=TokenizerConfig(kind="bytes"))
        return Target(home, name, read, *(form or (None,)), is_protected=False)

    def compressed(tree: Any) -> bytes:
        return zstandard.compress(write_lines(tree))

    return {
        "documents": target("text.jsonl", parse_lines, write_lines),
        "compressed documents": target("text.jsonl.zst", lambda content: records, compressed),
        "text": target("text.txt"),
    }
