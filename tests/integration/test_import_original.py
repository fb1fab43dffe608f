"""Weights of the original code and in Hugging Face's layout: same losses, nothing lost."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_pipeline.tokenizer import Tokenizer
from pretrain.cli import main
from pretrain.errors import CheckpointError
from pretrain.weights.export import load_export
from pretrain.weights.original import checked_loss, import_state, read_state_dict
from tests.helpers.models import random_tokens
from tests.helpers.original_settings import config_of_original
from tests.helpers.reference_model import DEFAULTS, random_state, reference_segment

ADAPTIVE = {"cutoffs": [9, 20], "div_val": 2, "tie_projs": [True] * 3, "untie_r": True}


def original(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    settings = {**DEFAULTS, **options}
    state, ties = random_state(settings)
    full = {name: tensor.detach() for name, tensor in state.items()}
    return settings, {**full, **{name: full[origin] for name, origin in ties.items()}}


def as_hugging_face(state: dict[str, Tensor]) -> dict[str, Tensor]:
    theirs = {
        f"transformer.{name}".replace("transformer.crit.", "crit."): state[name] for name in state
    }
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        theirs[name] = theirs[name].flip(0)
    for bias in ("r_w_bias", "r_r_bias"):
        for layer, rows in enumerate(theirs.pop(f"transformer.{bias}")):
            theirs[f"transformer.layers.{layer}.dec_attn.{bias}"] = rows
    return theirs


@pytest.mark.parametrize("options", [{}, ADAPTIVE])
def test_imported_weights_give_the_originals_losses(options: dict[str, Any]) -> None:
    settings, state = original(options)
    tokens_LB = random_tokens(7, 3, vocab_size=settings["n_token"])
    expected_LB = reference_segment(state, {}, settings, tokens_LB[:-1], tokens_LB[1:], []).nll
    module = import_state(state, config_of_original(settings))
    with torch.no_grad():
        nll_BL, _ = module(tokens_LB[:-1].T, tokens_LB[1:].T, None)
    torch.testing.assert_close(nll_BL.T.double(), expected_LB, atol=2e-5, rtol=1e-5)


def test_hugging_faces_layout_gives_the_same_model() -> None:
    settings, state = original(ADAPTIVE)
    config = config_of_original(settings)
    expected, found = import_state(state, config), import_state(as_hugging_face(state), config)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, found.get_parameter(name)), name


def test_biases_of_layers_are_not_dropped() -> None:
    settings, state = original(ADAPTIVE)
    config = dataclasses.replace(config_of_original(settings), untie_biases=False)
    with pytest.raises(CheckpointError, match="untie_biases=true"):
        import_state(as_hugging_face(state), config)


def test_missing_unused_and_untied_tensors_are_named() -> None:
    settings, state = original({})
    config = config_of_original(settings)
    missing = "layers.1.dec_attn.r_net.weight"
    with pytest.raises(CheckpointError, match=missing):
        import_state({name: value for name, value in state.items() if name != missing}, config)
    with pytest.raises(CheckpointError, match="surplus_a, surplus_b"):
        import_state({**state, "surplus_a": torch.ones(1), "surplus_b": torch.ones(1)}, config)
    untied = "crit.out_layers.0.weight"
    with pytest.raises(CheckpointError, match="tie_embeddings=false"):
        import_state({**state, untied: state["word_emb.emb_layers.0.weight"] + 1}, config)
    settings, state = original(ADAPTIVE)
    config = dataclasses.replace(config_of_original(settings), num_layers=settings["n_layer"] + 1)
    with pytest.raises(CheckpointError, match=r"model\.num_layers"):
        import_state(state, config)


def test_weights_that_are_no_numbers_fail_the_forward_pass() -> None:
    settings, state = original({})
    state["layers.0.dec_attn.o_net.weight"] *= torch.nan
    with pytest.raises(CheckpointError, match="nan"):
        checked_loss(import_state(state, config_of_original(settings)))


NO_STATES = {
    "a model, whose pickle would be executed": nn.Linear(2, 2),
    "a number as name": {1: torch.ones(2)},
    "a scalar": {"a": torch.tensor(1.0)},
    "complex numbers": {"a": torch.ones(2, dtype=torch.complex64)},
    "a list": [torch.ones(2)],
    "more elements than the file has": {"a": torch.zeros(1).as_strided((10**12,), (0,))},
    "text": b"hello world",
    "nothing": None,
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", NO_STATES)
def test_what_is_no_state_dict_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path, content = tmp_path / "state.pt", NO_STATES[name]
    if content is os.mkfifo:
        os.mkfifo(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=str(path)):
        read_state_dict(path)


def test_the_command_writes_an_export_with_the_originals_words(tmp_path: Path, capsys) -> None:
    words = ["<eos>", *(f"w{number}" for number in range(39))]
    (tmp_path / "words.txt").write_text("".join(f"{word} 7\n" for word in words))
    _, state = original({"n_token": len(words)})
    torch.save(state, tmp_path / "state.pt")
    sizes = "num_layers: 2, d_model: 16, num_heads: 2, d_head: 8, d_inner: 24, memory_length: 6"
    data = "data: {path: absent, lanes: 4, segment_length: 8}"
    (tmp_path / "original.yaml").write_text(f"model: {{{sizes}}}\n{data}\noptim: {{steps: 1}}\n")
    command = ["import-original", str(tmp_path / "state.pt"), "--output", str(tmp_path / "out")]
    command += ["--config", str(tmp_path / "original.yaml")]
    command += ["--vocabulary", str(tmp_path / "words.txt")]
    assert main(command) == 0
    module, config, step = load_export(tmp_path / "out")
    expected = import_state(state, config.model)
    assert step == 0
    for name, value in expected.named_parameters():
        assert torch.equal(module.get_parameter(name), value), name
    assert main(command) == 2, "it exists already"
    assert Tokenizer.load(tmp_path / "out" / "tokenizer").vocab_size == len(words)
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "out"), "--prompt", "w3 w4", "--tokens", "20"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("w3 w4")
    assert set(text[5:].split()) <= set(words)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_that_wrappers_begin_are_read_and_other_families_refused(wrapper: str) -> None:
    settings, state = original({})
    config = config_of_original(settings)
    wrapped = {f"{wrapper}{name}": tensor for name, tensor in state.items()}
    expected, found = import_state(state, config), import_state(wrapped, config)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, found.get_parameter(name)), name
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        import_state({"model.embed_tokens.weight": torch.ones(2, 2)}, config)
