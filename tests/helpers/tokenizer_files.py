"""Files of other systems' tokenizers, made by their own libraries: the same bytes every time."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

END = "<|endoftext|>"
# Words, numbers, marks and spaces, as GPT-2's pattern tells them apart.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_level_json(texts: Sequence[str], vocab_size: int = 320) -> str:
    """A tokenizer.json like GPT-2's: byte-level BPE with one special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    more = {"show_progress": False, "initial_alphabet": alphabet, "special_tokens": [END]}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **more))
    return tokenizer.to_str()


def llama_like_json(texts: Sequence[str]) -> str:
    """A tokenizer.json like that of Llama: a space before words, and bytes for what is unknown."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=80, show_progress=False)
    trained.train_from_iterator([text.replace(" ", "\u2581") for text in texts], trainer)
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    names += sorted(model["vocab"], key=model["vocab"].get)
    merges = [tuple(merge) for merge in model["merges"]]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")  # type: ignore[assignment]
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.to_str()


def tiktoken_file(texts: Sequence[str], path: Path, vocab_size: int = 320) -> dict[str, object]:
    """Write ranks of a small encoding to `path`; return the tokenizer's settings."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as in GPT-2's alphabet
    others = [value for value in range(256) if value not in printable]
    values = {chr(value): value for value in printable}
    values |= {chr(256 + number): value for number, value in enumerate(others)}
    model = json.loads(byte_level_json(texts, vocab_size))["model"]
    tokens = [bytes([value]) for value in range(256)]
    for merge in model["merges"]:
        tokens.append(bytes(values[each] for each in "".join(merge)))
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    path.write_bytes(b"".join(lines))
    return {"path": path, "pattern": PATTERN, "special_tokens": {END: len(tokens) + 1}}
