"""Golden vectors: known answers, recorded from the tests' independent float64 reference.

`python -m tests.golden.record_vectors` writes the files again, `python -m tests.golden FILES`
compares the model with them. They hold parameters, tokens, losses, hidden states, memories and
gradients of three segments, all time-major [L, B, D]. The settings are those of the vectors
recorded from the published implementation itself, at a smaller size. A file changes only when the
reference does; the commit says why.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.reference_model import DEFAULTS, random_state, reference_segment

DIRECTORY = Path(__file__).parent
SMALL = {"n_token": 19, "d_model": 8, "d_head": 4, "d_inner": 12, "d_embed": 8, "bsz": 2}
CASES: dict[str, dict[str, Any]] = {
    "memory_equals_segment": {},
    "memory_longer": {"mem_len": 8},
    "memory_shorter": {"tgt_len": 8, "mem_len": 3},
    "clamp_same_length": {"mem_len": 8, "clamp_len": 5, "same_length": True},
    "untied_biases_pre_norm": {"untie_r": True, "pre_lnorm": True},
    "adaptive_div2": {"cutoffs": [5, 11], "div_val": 2, "tie_projs": [False, True, True]},
    "no_memory": {"mem_len": 0},
}
# (queries, rows of memory, memory length, same_length)
MASKS = (
    *((6, 0, 6, 0), (6, 6, 6, 0), (6, 6, 6, 1)),
    *((6, 0, 8, 1), (6, 6, 8, 1), (6, 8, 8, 1)),
    *((8, 0, 3, 1), (8, 3, 3, 1)),
)
SHIFTS = ((1, 1), (1, 5), (3, 3), (3, 5), (4, 9), (5, 6))  # (queries, keys)

Arrays = dict[str, np.ndarray]


def case_arrays(options: dict[str, Any]) -> Arrays:
    """Return a case: three segments with memory, and gradients of the sum of their mean losses."""
    settings = {**DEFAULTS, **options}
    state, ties = random_state(settings)
    length, context = settings["tgt_len"], settings["ext_len"]
    shape = (settings["n_seg"] * length + 1, settings["bsz"])
    generator = torch.Generator().manual_seed(1)
    stream = torch.randint(0, settings["n_token"], shape, generator=generator)
    arrays: Arrays = {"config": np.array(json.dumps(settings))}
    losses, memories = [], []
    for s in range(settings["n_seg"]):
        first, last = s * length, (s + 1) * length
        tokens, targets = stream[max(0, first - context) : last], stream[first + 1 : last + 1]
        result = reference_segment(state, ties, settings, tokens, targets, memories)
        memories = result.memories
        losses.append(result.nll.mean())
        arrays |= {f"inp/{s}": tokens.numpy(), f"tgt/{s}": targets.numpy()}
        arrays[f"nll/{s}"] = result.nll.detach().numpy()
        arrays[f"hid/{s}"] = result.hidden.detach().numpy()
        arrays |= {f"mem/{s}/{level}": rows.numpy() for level, rows in enumerate(memories)}
    torch.stack(losses).sum().backward()
    for name, tensor in state.items():
        assert tensor.grad is not None
        arrays |= {f"param/{name}": tensor.detach().numpy(), f"grad/{name}": tensor.grad.numpy()}
    return arrays | {f"alias/{name}": np.array(origin) for name, origin in ties.items()}


def mask_arrays() -> Arrays:
    """Attention masks, True where a query may not see a key, pair by pair."""
    arrays: Arrays = {}
    for queries, rows, length, same in MASKS:
        mask = np.zeros((queries, rows + queries), dtype=bool)
        for i, j in np.ndindex(mask.shape):
            distance = i + rows - j
            mask[i, j] = distance < 0 or bool(same and distance >= length)
        arrays[f"q{queries}_mlen{rows}_memlen{length}_same{same}"] = mask
    return arrays


def shift_arrays() -> Arrays:
    """Return inputs and results of the shift: (i, j) comes from column j + queries - 1 - i.

    Past the last column, where the key comes after the query, the published code leaves the
    contents of its view: a zero, then the start of the next row.
    """
    arrays: Arrays = {}
    for queries, keys in SHIFTS:
        values = np.random.RandomState(queries * 100 + keys).standard_normal((queries, keys))
        shifted = np.zeros_like(values)
        for i, j in np.ndindex(values.shape):
            column = j + queries - 1 - i
            if column < keys:
                shifted[i, j] = values[i, column]
            elif column > keys:
                shifted[i, j] = values[i + 1, column - keys - 1]
        arrays |= {f"in_{queries}x{keys}": values, f"out_{queries}x{keys}": shifted}
    return arrays


def write(path: Path, arrays: Arrays) -> Path:
    """Save the arrays as a .npz file."""
    np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]
    return path


if __name__ == "__main__":
    for name, options in CASES.items():
        write(DIRECTORY / f"{name}.npz", case_arrays({**SMALL, **options}))
    write(DIRECTORY / "masks.npz", mask_arrays())
    write(DIRECTORY / "relative_shift.npz", shift_arrays())
