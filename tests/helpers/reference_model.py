"""A second Transformer-XL, from the formulas, with loops over layers, heads and distances.

It reads a state dict under the original's names and shares no code with the package: an independent
opinion on every option, including those that no recorded case covers. Time-major as the original:
[L, B, D]. Slow.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Settings = dict[str, Any]

DEFAULTS: Settings = {
    "n_token": 37, "n_layer": 2, "n_head": 2, "d_model": 16, "d_head": 8, "d_inner": 24,
    "d_embed": 16, "div_val": 1, "cutoffs": [], "tie_weight": True, "tie_projs": [False],
    "pre_lnorm": False, "tgt_len": 6, "mem_len": 6, "ext_len": 0, "same_length": False,
    "clamp_len": -1, "untie_r": False, "attn_type": 0, "bsz": 3, "n_seg": 3,
}  # fmt: skip


@dataclass
class Segment:
    """What the reference computes for one segment."""

    nll: Tensor
    hidden: Tensor
    memories: list[Tensor]


def random_state(settings: Settings, seed: int = 0) -> tuple[State, dict[str, str]]:
    """Leaf tensors under the original's names, and which names are tied to which."""
    shapes, ties = _shapes_and_ties(settings)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
        state[name] = (values + 1 if "norm.weight" in name else values).requires_grad_()
    return state, ties


def reference_segment(
    state: State,
    ties: dict[str, str],
    settings: Settings,
    tokens: Tensor,
    targets: Tensor,
    memories: list[Tensor],
) -> Segment:
    """One segment [q, B]; the NLL is that of the last rows, as many as there are targets."""
    full = {**state, **{name: state[origin] for name, origin in ties.items()}}
    hidden = _embed(full, settings, tokens)
    levels = [hidden]
    for layer in range(settings["n_layer"]):
        memory = memories[layer] if memories else hidden[:0]
        hidden = _layer(full, settings, layer, hidden, memory)
        levels.append(hidden)
    kept = []
    for level, rows in enumerate(levels):
        old = memories[level] if memories else rows[:0]
        end = rows.shape[0] + max(0, old.shape[0] - settings["ext_len"])
        kept.append(torch.cat([old, rows])[max(0, end - settings["mem_len"]) : end].detach())
    last = hidden[hidden.shape[0] - targets.shape[0] :]
    return Segment(_nll(full, settings, last, targets), last, kept)


def _edges(settings: Settings) -> list[int]:
    return [0, *settings["cutoffs"], settings["n_token"]]


def _shapes_and_ties(settings: Settings) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    d, e, div, inner = (settings[name] for name in ("d_model", "d_embed", "div_val", "d_inner"))
    edges, width = _edges(settings), settings["n_head"] * settings["d_head"]
    bias = (settings["n_head"], settings["d_head"])
    bias = (settings["n_layer"], *bias) if settings["untie_r"] else bias
    shapes: dict[str, tuple[int, ...]] = {"r_w_bias": bias, "r_r_bias": bias}
    ties = {}
    tables = len(edges) - 1 if div > 1 else 1
    for i in range(tables):
        rows, columns = (edges[i + 1] - edges[i] if div > 1 else settings["n_token"], e // div**i)
        shapes[f"word_emb.emb_layers.{i}.weight"] = (rows, columns)
        shapes[f"crit.out_layers.{i}.bias"] = (rows,)
        if settings["tie_weight"]:
            ties[f"crit.out_layers.{i}.weight"] = f"word_emb.emb_layers.{i}.weight"
        else:
            shapes[f"crit.out_layers.{i}.weight"] = (rows, columns)
        if div > 1 or e != d:
            shapes[f"word_emb.emb_projs.{i}"] = (d, columns)
    for i in range(len(edges) - 1 if div > 1 or e != d else 0):
        if settings["tie_projs"][i]:
            ties[f"crit.out_projs.{i}"] = f"word_emb.emb_projs.{i if div > 1 else 0}"
        else:
            shapes[f"crit.out_projs.{i}"] = (d, e // div**i)
    if settings["cutoffs"]:
        shapes["crit.cluster_weight"] = (len(settings["cutoffs"]), e)
        shapes["crit.cluster_bias"] = (len(settings["cutoffs"]),)
    for layer in range(settings["n_layer"]):
        attention, feed_forward = f"layers.{layer}.dec_attn.", f"layers.{layer}.pos_ff."
        shapes[attention + "qkv_net.weight"] = (3 * width, d)
        shapes[attention + "r_net.weight"] = (width, d)
        shapes[attention + "o_net.weight"] = (d, width)
        for number, sizes in ((0, (inner, d)), (3, (d, inner))):
            shapes[feed_forward + f"CoreNet.{number}.weight"] = sizes
            shapes[feed_forward + f"CoreNet.{number}.bias"] = sizes[:1]
        for part in (attention, feed_forward):
            shapes |= {part + "layer_norm.weight": (d,), part + "layer_norm.bias": (d,)}
    return shapes, ties


def _embed(state: State, settings: Settings, tokens: Tensor) -> Tensor:
    edges, vectors = _edges(settings), []
    for token in tokens.flatten().tolist():
        i, first = 0, 0
        if settings["div_val"] > 1:
            i = max(bin_ for bin_ in range(len(edges) - 1) if token >= edges[bin_])
            first = edges[i]
        vector, projection = (
            state[f"word_emb.emb_layers.{i}.weight"][token - first],
            f"word_emb.emb_projs.{i}",
        )
        vectors.append(state[projection] @ vector if projection in state else vector)
    return torch.stack(vectors).view(*tokens.shape, -1) * math.sqrt(settings["d_model"])


def _norm(state: State, name: str, rows: Tensor) -> Tensor:
    centered = rows - rows.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    weight, bias = (state[f"{name}layer_norm.{part}"] for part in ("weight", "bias"))
    return centered / (variance + 1e-5).sqrt() * weight + bias


def _encoding(distance: int, settings: Settings) -> Tensor:
    if settings["clamp_len"] > 0:
        distance = min(distance, settings["clamp_len"])
    d = settings["d_model"]
    angles = [distance / 10000 ** (2 * c / d) for c in range(d // 2)]
    values = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(values, dtype=torch.float64)


def _layer(state: State, settings: Settings, layer: int, hidden: Tensor, memory: Tensor) -> Tensor:
    attention, feed_forward = f"layers.{layer}.dec_attn.", f"layers.{layer}.pos_ff."

    def linear(rows: Tensor, name: str) -> Tensor:
        return rows @ state[f"{feed_forward}{name}.weight"].T + state[f"{feed_forward}{name}.bias"]

    def fed_forward(rows: Tensor) -> Tensor:
        return linear(torch.relu(linear(rows, "CoreNet.0")), "CoreNet.3")

    rows, count = torch.cat([memory, hidden]), hidden.shape[0]
    if settings["pre_lnorm"]:
        summed = hidden + _attended(state, settings, layer, _norm(state, attention, rows), count)
        return summed + fed_forward(_norm(state, feed_forward, summed))
    attended = _attended(state, settings, layer, rows, count)
    summed = _norm(state, attention, hidden + attended)
    return _norm(state, feed_forward, summed + fed_forward(summed))


def _attended(state: State, settings: Settings, layer: int, rows: Tensor, count: int) -> Tensor:
    """Of the last rows: one head, one query, one key at a time; lanes side by side."""
    name, heads, width = f"layers.{layer}.dec_attn.", settings["n_head"], settings["d_head"]
    query, key, value = (rows @ state[name + "qkv_net.weight"].T).split(heads * width, dim=-1)
    u, v = (state[bias] for bias in ("r_w_bias", "r_r_bias"))
    if settings["untie_r"]:
        u, v = u[layer], v[layer]
    outputs = []
    for i in range(rows.shape[0] - count, rows.shape[0]):
        first = i + 1 - settings["mem_len"] if settings["same_length"] else 0
        keys, output = list(range(max(0, first), i + 1)), []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = []
            for j in keys:
                relative = (state[name + "r_net.weight"] @ _encoding(i - j, settings))[part]
                scores.append(
                    ((query[i, :, part] + u[head]) * key[j, :, part]).sum(-1)
                    + (query[i, :, part] + v[head]) @ relative
                )
            weights = torch.softmax(torch.stack(scores) / math.sqrt(width), dim=0)
            output.append((weights[:, :, None] * value[keys][:, :, part]).sum(0))
        outputs.append(torch.cat(output, dim=-1))
    return torch.stack(outputs) @ state[name + "o_net.weight"].T


def _nll(state: State, settings: Settings, hidden: Tensor, targets: Tensor) -> Tensor:
    edges, losses = _edges(settings), []
    clusters = len(settings["cutoffs"])

    def logits(row: Tensor, i: int) -> Tensor:
        has_bins = settings["div_val"] > 1
        j, rows = (i, slice(None)) if has_bins else (0, slice(edges[i], edges[i + 1]))
        weight, bias = (state[f"crit.out_layers.{j}.{part}"][rows] for part in ("weight", "bias"))
        if i == 0 and clusters:
            weight = torch.cat([weight, state["crit.cluster_weight"]])
            bias = torch.cat([bias, state["crit.cluster_bias"]])
        row = row @ state[f"crit.out_projs.{i}"] if f"crit.out_projs.{i}" in state else row
        return torch.log_softmax(weight @ row + bias, dim=0)

    for row, target in zip(hidden.flatten(0, 1), targets.flatten().tolist(), strict=True):
        i = max(bin_ for bin_ in range(clusters + 1) if target >= edges[bin_])
        head = logits(row, 0)
        losses.append(-head[target] if i == 0 else -(head[-i] + logits(row, i)[target - edges[i]]))
    return torch.stack(losses).view(targets.shape)
