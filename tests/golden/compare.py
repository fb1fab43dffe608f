"""The model against recorded results of the original implementation, in float64.

A case contains parameters, tokens, losses, hidden states, memories and gradients of a few
consecutive segments. Two more kinds of files contain attention masks or the relative shift.
Everything in the files is time-major, [L, B, D]. tests/golden/record_vectors.py writes such files.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pretrain.kernels.cpu.attention import relative_shift
from pretrain.model.memory import Carried, Memory, MemoryLayout
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL
from pretrain.model.visibility import forbidden_LC
from pretrain.weights.original import original_to_ours
from tests.helpers.original_settings import config_of_original

LIMIT = 1e-10
MASK_NAME = re.compile(r"q(\d+)_mlen(\d+)_memlen(\d+)_same([01])")
COLUMNS = ("NLL", "hidden", "memories", "gradients", "entries")  # entries of masks and shifts

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Result:
    """The largest absolute errors of a file by column; `note` is the reason if there are none."""

    name: str
    errors: dict[str, float]
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.note:
            return self.note
        # The comparison is such that a NaN fails.
        return "ok" if all(error <= LIMIT for error in self.errors.values()) else "FAILED"


def compare(path: Path) -> Result:
    """Compute what the file records, and compare."""
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    if "config" in arrays:
        return _compare_case(path.stem, arrays)
    if all(MASK_NAME.fullmatch(name) for name in arrays):
        return _compare_masks(path.stem, arrays)
    return _compare_shifts(path.stem, arrays)


def _compare_masks(name: str, arrays: Arrays) -> Result:
    differing = 0
    for case, expected in arrays.items():
        match = MASK_NAME.fullmatch(case)
        assert match is not None
        num_queries, num_memory, memory_length, same_length = map(int, match.groups())
        window = memory_length if same_length else 0
        found = forbidden_LC(num_queries, num_memory + num_queries, window)
        differing += int((found != torch.from_numpy(expected)).sum())
    return Result(name, {"entries": float(differing)})


def _compare_shifts(name: str, arrays: Arrays) -> Result:
    errors = []
    for name_in in (key for key in arrays if key.startswith("in_")):
        padded = pad(torch.from_numpy(arrays[name_in])[None], (1, 0))
        expected = torch.from_numpy(arrays["out" + name_in[2:]])
        errors.append(_largest_difference(relative_shift(padded)[0], expected))
    return Result(name, {"entries": max(errors)})


def _compare_case(name: str, arrays: Arrays) -> Result:
    settings = json.loads(str(arrays["config"]))
    if settings.get("attn_type"):
        note = f"not supported: attn_type {settings['attn_type']}; the paper's attention is 0"
        return Result(name, {}, note=note)
    config = config_of_original(settings)
    model = TransformerXL(config).double()
    load_parameters(model, original_to_ours(_group(arrays, "param/"), config))
    errors: dict[str, float] = {"NLL": 0.0, "hidden": 0.0, "gradients": 0.0}
    if config.memory_length:
        errors["memories"] = 0.0
    replay = Replay(model, settings["ext_len"])
    losses = []
    for segment in range(settings["n_seg"]):
        targets_BL = _batch_major(arrays[f"tgt/{segment}"])
        hidden_BLD = replay.advance(_batch_major(arrays[f"inp/{segment}"]))
        hidden_BLD = hidden_BLD[:, -targets_BL.shape[1] :]
        nll_BL = model.head(hidden_BLD, targets_BL)
        losses.append(nll_BL.mean())
        _note_error(errors, "NLL", nll_BL, _batch_major(arrays[f"nll/{segment}"]))
        _note_error(errors, "hidden", hidden_BLD, _batch_major(arrays[f"hid/{segment}"]))
        for level, rows_BMD in enumerate(replay.levels if config.memory_length else []):
            expected = _batch_major(arrays[f"mem/{segment}/{level}"])
            _note_error(errors, "memories", rows_BMD, expected)
    torch.stack(losses).sum().backward()
    expected_gradients = original_to_ours(_group(arrays, "grad/"), config)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        _note_error(errors, "gradients", parameter.grad, expected_gradients[parameter_name])
    return Result(name, errors)


class Replay:
    """A model that reads segment by segment, with the memories of the original.

    These are this model's levels and the last hidden states. The first `context_length` (ext_len)
    rows of a segment are context that is read a second time. This model has no such option, so the
    rows that its memory keeps are chosen here by the original's rule.
    """

    def __init__(self, model: TransformerXL, context_length: int) -> None:
        self.levels: list[Tensor] = []
        self._model = model
        self._context_length = context_length
        self._memory: Memory | None = None

    def advance(self, tokens_BL: Tensor) -> Tensor:
        """Return the segment's hidden states before the softmax, [B, L, D]."""
        inputs_BLD: list[Tensor] = []

        def note(_: object, inputs: tuple[Tensor, ...]) -> None:
            inputs_BLD.append(inputs[0])

        hooks = [layer.register_forward_pre_hook(note) for layer in self._model.layers]
        hidden_BLD, memory, _ = self._model.hidden_states(tokens_BL, self._memory)
        for hook in hooks:
            hook.remove()
        state = MemoryLayout(self._model.config)
        old = self.levels or [hidden_BLD[:, :0]] * (len(inputs_BLD) + 1)
        self.levels = list(map(self._kept, zip(old, [*inputs_BLD, hidden_BLD], strict=True)))
        if self._context_length:
            documents_BM = torch.zeros(self.levels[0].shape[:2], dtype=torch.int32)
            layers = tuple((level,) for level in self.levels[:-1])
            memory = state.joined(Carried(layers, documents_BM))
        else:
            self.levels[:-1] = [hidden_BMD for (hidden_BMD,) in state.taken_apart(memory).layers]
        self._memory = memory
        return hidden_BLD

    def _kept(self, old_and_new: tuple[Tensor, Tensor]) -> Tensor:
        old_BMD, new_BLD = old_and_new
        end = new_BLD.shape[1] + max(0, old_BMD.shape[1] - self._context_length)
        first = max(0, end - self._model.config.longest_memory)
        return torch.cat(old_and_new, dim=1)[:, first:end].detach()


def _group(arrays: Arrays, prefix: str) -> dict[str, Tensor]:
    names = [name for name in arrays if name.startswith(prefix)]
    return {name[len(prefix) :]: torch.from_numpy(arrays[name]) for name in names}


def _batch_major(array_LBX: np.ndarray) -> Tensor:
    return torch.from_numpy(array_LBX).transpose(0, 1)


def _note_error(errors: dict[str, float], column: str, found: Tensor, expected: Tensor) -> None:
    # Not max(): a NaN must remain.
    error = _largest_difference(found, expected)
    errors[column] = error if not error <= errors[column] else errors[column]


def _largest_difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return (found.detach() - expected).abs().max().item() if expected.numel() else 0.0
