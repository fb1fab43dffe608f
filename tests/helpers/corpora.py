"""Small corpora for tests: real builds of generated text, the same bytes every time."""

import io
import json
import random
from pathlib import Path

import numpy as np

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.lengths import write_lengths
from data_pipeline.corpora.manifest import Manifest, ShardInfo
from data_pipeline.shards.shards import ShardFormat, shard_name, write_shard
from data_pipeline.tokenizer import Tokenizer
from foundation.files import sha256_of

SUBJECTS = ["the river", "a lantern", "our captain", "the old clock", "her letter", "a grey horse"]
SUBJECTS += ["the harbour", "my brother"]
VERBS = ["carried", "forgot", "answered", "followed", "painted", "remembered", "crossed"]
VERBS += ["waited for"]
OBJECTS = ["the morning", "a silver key", "the quiet town", "two strangers", "the long road"]
OBJECTS += ["a paper boat", "the storm"]
TINY_VOCABULARIES = {"bytes": 300, "unigram": 320, "bpe": 400}


def make_text(generator: random.Random, sentences: int) -> str:
    """Sentences that a small model can learn; each document keeps to one subject."""
    subject = generator.choice(SUBJECTS)
    lines = []
    for number in range(sentences):
        line = f"{subject} {generator.choice(VERBS)} {generator.choice(OBJECTS)}."
        lines.append(line.capitalize() + ("\n" if number % 4 == 3 else ""))
    return "\n".join(lines)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """One record per text, with the ids d0, d1, ..."""
    lines = [json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(texts)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def make_tiny_corpus(
    directory: Path, *, documents: int = 60, seed: int = 0, vocabulary: str = "bytes"
) -> Path:
    """Build a train and a validation split of generated documents in `directory`, which comes back.

    About 400 bytes a document, several shards a split; `vocabulary` is a tokenizer kind: bytes,
    unigram or bpe.
    """
    generator = random.Random(seed)
    texts = [make_text(generator, generator.randint(2, 20)) for _ in range(documents)]
    source = write_jsonl(directory.with_name(f".{directory.name}-text") / "text.jsonl", texts)
    tokenizer = TokenizerConfig(kind=vocabulary, vocab_size=TINY_VOCABULARIES[vocabulary])
    sizes = {"validation_fraction": 0.2, "shard_bytes": 6000, "threads": 1}
    build_corpus(CorpusConfig(input=(source,), output=directory, tokenizer=tokenizer, **sizes))
    return directory


def write_numbered_corpus(
    directory: Path, shards: list[list[int]], form: ShardFormat = "mds", is_stream: bool = False
) -> Corpus:
    """A split whose documents have the given lengths and whose tokens are 0, 1, 2, ... in the order
    of storage.

    A token's value thus says where it is from. Only the text is missing: shards and manifest are
    the real ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    infos, first = [], 0
    for number, lengths in enumerate(shards):
        path = directory / shard_name(number, form)
        documents = []
        for length in lengths:
            tokens = np.arange(first, first + length, dtype=np.uint32)
            documents.append((f"document {first}", tokens))
            first += length
        write_shard(path, documents, directory / "scratch")
        size, sha256 = path.stat().st_size, sha256_of(path)
        counts = (len(lengths), sum(lengths), max(lengths))
        listed = write_lengths(path, sha256, lengths)
        infos.append(ShardInfo(path.name, *counts, size, sha256, 0, 0, listed))
    Manifest("uint32", "0" * 64, 1 << 31, 1 << 32, tuple(infos), is_stream).write(directory)
    return Corpus.open(directory)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below `directory` with its bytes."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def users_model(texts: list[str], model_type: str = "bpe", **settings) -> bytes:
    """A SentencePiece model as its own defaults make it: a space at the start, and no bytes."""
    import sentencepiece

    model = io.BytesIO()
    settings |= {"vocab_size": 200, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type=model_type, **settings
    )
    return model.getvalue()


def config_of(tmp_path: Path, texts: list[str], **settings) -> CorpusConfig:
    """Settings that build `texts` into `tmp_path / "out"`."""
    source = write_jsonl(tmp_path / "in" / "x.jsonl", texts)
    settings = {"validation_fraction": 0.2, "shard_bytes": 3000, "threads": 1, **settings}
    settings.setdefault("tokenizer", TokenizerConfig(kind="bytes"))
    return CorpusConfig(input=(source,), output=tmp_path / "out", **settings)


def some_texts(count: int = 80, seed: int = 0) -> list[str]:
    """Short documents, the same every time."""
    generator = random.Random(seed)
    return [make_text(generator, generator.randint(1, 12)) for _ in range(count)]


def stored(split: Path) -> list[tuple[str, list[int]]]:
    """Id and tokens of every document of a split in the order of storage."""
    corpus = Corpus.open(split)
    return [
        (shard.document_id(document), shard.tokens(document).tolist())
        for shard in map(corpus.shard, range(len(corpus.manifest.shards)))
        for document in range(len(shard))
    ]


def documents_of(directory: Path) -> dict[str, str]:
    """The text of every document, decoded from the shards."""
    corpus = Corpus.open(directory)
    tokenizer = Tokenizer.load(corpus.tokenizer_directory)
    found = {}
    for name, tokens in stored(directory):
        assert tokens.index(tokenizer.end_id) == len(tokens) - 1
        found[name] = tokenizer.decode(tokens)
    return found
