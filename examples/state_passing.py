"""A toy of state passing (arXiv 2507.02782): the parts of examples/state-passing.sh in Python.

python examples/state_passing.py train  TEXT DIR SEED [STEPS]   a tiny hybrid, without state
python examples/state_passing.py losses CORPUS OUT.csv NAME=DIR ...   its loss by position
"""

import csv
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data_pipeline import Corpus
from pretrain.model.cached import new_stream
from pretrain.model.transformers_modules import library
from pretrain.weights.huggingface.adoption import adopted_model

SEGMENT, WINDOWS, STEPS, RATE = 64, 32, 3000, 2e-3
LANES, LONGEST = 32, 64 * SEGMENT  # of the text whose loss is measured
BINS = [0, 16, 32, 64, 128, 256, 512, 1024, 2048, LONGEST]
MODEL = {
    "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {name: number for number, name in enumerate(["<|end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(names, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(text: Path, directory: Path, seed: int, steps: int) -> None:
    """Train on windows of 64 tokens, each from an empty state, and save for transformers."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    words = text.read_text()
    parts = tokenizer.encode(words[: len(words) * 4 // 5]).ids  # the end is for validation
    tokens, numbers = torch.tensor(parts), torch.Generator().manual_seed(seed)
    with library() as transformers:
        config = transformers.CONFIG_MAPPING["qwen3_5_text"](**MODEL)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
        for step in range(steps):
            starts = torch.randint(len(tokens) - SEGMENT - 1, (WINDOWS, 1), generator=numbers)
            window = tokens[starts + torch.arange(SEGMENT + 1)]
            logits = model(input_ids=window[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 500 == 499:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def losses(corpus: Path, output: Path, named: list[str]) -> None:
    """Write the loss by position of streams that start empty, read in segments of 64."""
    split = Corpus.open(corpus / "validation")
    shard = split.shard(0)
    documents = [shard.tokens(number) for number in range(len(shard.lengths))]
    text = np.concatenate(documents).astype(np.int64)
    starts = np.linspace(0, len(text) - LONGEST - 1, LANES).astype(int)
    tokens = torch.tensor(np.stack([text[start : start + LONGEST + 1] for start in starts]))
    rows = []
    for name, directory in (pair.split("=", 1) for pair in named):
        stream, nll = new_stream(adopted_model(Path(directory)), SEGMENT, SEGMENT), []
        for start in range(0, LONGEST, SEGMENT):
            piece = tokens[:, start : start + SEGMENT + 1]
            nll.append(stream.nll_BL(piece[:, :-1], piece[:, 1:]))
        by_position = torch.cat(nll, dim=1).mean(0)
        means = [by_position[a:b].mean().item() for a, b in itertools.pairwise(BINS)]
        rows.append([name, *(f"{mean:.3f}" for mean in means)])
        print(*rows[-1], flush=True)
    with output.open("w", newline="") as file:
        csv.writer(file).writerows([["model", *(f"to {last}" for last in BINS[1:])], *rows])


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "train":
        text, directory, seed, *steps = arguments
        train(Path(text), Path(directory), int(seed), int(steps[0]) if steps else STEPS)
    else:
        losses(Path(arguments[0]), Path(arguments[1]), arguments[2:])
