"""What memory is worth, token by token: a notebook as a script (cells begin with `# %%`).

Needs a run and its corpus, such as those of `make demo`: `python examples/memory.py
runs/demo/killed runs/demo/data`. It reads up to 100,000 tokens in segments, once with the memory
that each segment leaves to the next and once without, and draws the loss over the position.
"""

# %% Load a run: its latest valid checkpoint, and the validation split.
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from data_pipeline import Corpus
from pretrain import load_trained

if len(sys.argv) < 3:
    sys.exit("usage: python examples/memory.py RUN CORPUS [PICTURE]")
RUN, CORPUS = sys.argv[1:3]
PICTURE = Path(sys.argv[3] if sys.argv[3:] else "memory.png")
TOKENS = 100_000
trained = load_trained(RUN)
model, length = trained.module, trained.segment_length
device = next(model.parameters()).device
corpus = Corpus.open(Path(CORPUS) / "validation")
print(f"{trained.config.model.memory_length} tokens of memory, segments of {length}")


# %% Read a document in pieces. The memory that a piece returns goes into the next one.
def losses(tokens: np.ndarray, carries: bool) -> np.ndarray:
    """Negative log-likelihood of every token but the first, in nats."""
    memory, parts = None, []
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, length):
            piece = tokens[None, start : start + length + 1].astype(np.int64)
            ids = torch.tensor(piece, device=device)
            nll, memory = model(ids[:, :-1], ids[:, 1:], memory if carries else None)
            parts.append(nll[0].float().cpu().numpy())
    return np.concatenate(parts)


# %% The same tokens twice: with memory, and with each segment alone.
with_memory, without, positions, left = [], [], [], TOKENS
for shard in map(corpus.shard, range(len(corpus.manifest.shards))):
    for number in range(len(shard.lengths)):
        tokens = shard.tokens(number)[: left + 1]
        if len(tokens) < 2 or left <= 0:
            continue
        with_memory.append(losses(tokens, carries=True))
        without.append(losses(tokens, carries=False))
        positions.append(np.arange(1, len(tokens)))
        left -= len(tokens) - 1
carried, alone, position = map(np.concatenate, (with_memory, without, positions))
print(f"{len(carried):,} tokens: loss {carried.mean():.4f} with memory, {alone.mean():.4f} without")

# %% The loss over the position in the document, in powers of two.
edges = 2 ** np.arange(0, int(np.log2(position.max())) + 2)
bins = np.digitize(position, edges)
figure, axes = plt.subplots(figsize=(6, 4))
for values, label in ((alone, "each segment alone"), (carried, "with memory")):
    means = [values[bins == b].mean() for b in np.unique(bins)]
    axes.plot(edges[np.unique(bins) - 1], means, marker="o", label=label)
axes.axvline(length, color="gray", linewidth=0.8, linestyle="--")
axes.set_xscale("log", base=2)
axes.set_xlabel("position in the document (tokens; dashed: one segment)")
axes.set_ylabel("loss (nats per token)")
axes.legend(frameon=False)
figure.savefig(PICTURE, dpi=150, bbox_inches="tight")
print(PICTURE)
