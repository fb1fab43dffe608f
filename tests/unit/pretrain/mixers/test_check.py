"""Kinds of layers: all of them pass their checks, each check sees its leaks, a stranger's folder
works as ours do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from foundation.errors import ConfigError
from pretrain.cli import main
from pretrain.config.mixer import LayerBytes, kinds_here, mixer_facts
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.mixers import check
from pretrain.mixers.deltanet import module as deltanet
from pretrain.model.layer import mixer_class
from pretrain.model.recurrent_parts import convolved
from pretrain.recovery.environment import own_environment
from tests.helpers.checkout import ROOT

SUBJECTS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in kinds_here()),
    ("attention", {"positions": "rope", "query_key_norm": True, "norm_position": "post"}),
    ("deltanet", {"num_heads": 4, "d_model": 16, "mixers": {"deltanet": {
        "key_width": 24, "value_width": 20, "key_heads": 1, "largest_write": 2.0}}}),
    ("mamba2", {"num_heads": 2, "d_model": 8, "mixers": {"mamba2": {
        "state_width": 6, "groups": 2}}}),
]  # fmt: skip
# What a layer gets: the forward pass itself, segment, state, tail and documents.
Leak = Callable[[Any, Any, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


@pytest.mark.parametrize(("kind", "settings"), SUBJECTS, ids=str)
def test_every_kind_passes_all_checks(kind, settings):
    checks = check.check_mixer(kind, settings)
    assert [each for each in checks if not each.passed] == []
    assert len(checks) == len(check.CHECKS)


def state_after(change: Callable[[Tensor, Tensor], Tensor]) -> Leak:
    """The state after the segment is made another, from it and the one before."""

    def leak(forward: Any, _: Any, x: Tensor, state: Tensor, tail: Tensor, documents: Tensor):
        output, after, tail = forward(x, state, tail, documents)
        return output, change(after, state), tail

    return leak


def before(change: Callable[..., tuple[Tensor, Tensor, Tensor, Any]]) -> Leak:
    """What the layer gets is made another."""
    return lambda forward, _, *inputs: forward(*change(*inputs))


def kept_in_the_module(forward: Any, layer: Any, x: Tensor, state: Tensor, *rest: Any):
    output, layer.kept, tail = forward(x, getattr(layer, "kept", state), *rest)
    return output, state, tail


def tail_across_documents(forward: Any, _: Any, *inputs: Any):
    return (*forward(*inputs)[:2], forward(*inputs[:3], None)[2])


def state_before_the_last_token(forward: Any, _: Any, x: Tensor, *rest: Any):
    output, state, tail = forward(x, *rest)
    if x.shape[1] > 1:
        state = forward(x[:, :-1], *rest[:2], rest[2][:, :-1])[1]
    return output, state, tail


def longer_tail(forward: Any, _: Any, x: Tensor, state: Tensor, tail: Tensor, documents: Tensor):
    output, state, tail = forward(x, state, tail[:, -3:], documents)
    return output, state, torch.cat([tail, tail], dim=1)


def late(documents: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(documents[:, :1]), documents[:, :-1]], dim=1)


def none_in_training(forward: Any, _: Any, *inputs: Any):
    return forward(*inputs[:3], None if torch.is_grad_enabled() else inputs[3])


def none_in_evaluation(forward: Any, layer: Any, *inputs: Any):
    return forward(*inputs[:3], inputs[3] if layer.training else None)


def silent_after_150_tokens(forward: Any, _: Any, x: Tensor, *rest: Any):
    output, *parts = forward(x, *rest)
    return output * (torch.arange(x.shape[1]) < 150)[:, None], *parts


def output_with_half_a_gradient(forward: Any, _: Any, *inputs: Any):
    output, *parts = forward(*inputs)
    return output.detach() / 2 + output / 2, *parts


# What breaks -> the check that must see it, and how it breaks.
LEAKS: dict[str, tuple[str, Leak]] = {
    "a state crosses the start of a document": (
        "isolation", before(lambda x, state, tail, _: (x, state, tail, None)),
    ),
    "a state is reset one token late": (
        "starts", before(lambda x, state, tail, documents: (x, state, tail, late(documents))),
    ),
    "the convolution's tail crosses documents": ("isolation", tail_across_documents),
    "padding of a chunk decays the state": (
        "segments", state_after(lambda after, _: after * 0.9),
    ),
    "a state is rounded to bf16": ("types", state_after(lambda after, _: after.bfloat16())),
    "a state is rounded on its way": (
        "segments", state_after(lambda after, _: after.bfloat16().to(after.dtype)),
    ),
    "a state is returned rounded": (
        "types", state_after(lambda after, _: after.bfloat16().to(after.dtype)),
    ),
    "one document is read as one per segment": (
        "joined", before(lambda x, s, tail, of: (x, s * (of is not None), tail, of)),
    ),
    "documents are needed that are not isolated": (
        "joined", before(lambda x, s, tail, of: (x, s, tail, of + 0)),
    ),
    "a training step crosses documents": ("modes", none_in_training),
    "an evaluation crosses documents": ("modes", none_in_evaluation),
    "a long segment ends in silence": ("segments", silent_after_150_tokens),
    "a backward pass halves a gradient": ("gradients", output_with_half_a_gradient),
    "an input's gradient is cut": (
        "gradients", before(lambda x, *rest: (x.detach(), *rest)),
    ),
    "a state's gradient is cut": (
        "gradients", before(lambda x, state, *rest: (x, state.detach(), *rest)),
    ),
    "a lane gets its neighbor's state": (
        "lanes", before(lambda x, state, *rest: (x, state.roll(1, 0), *rest)),
    ),
    "a state stays in the module": ("saved", kept_in_the_module),
    "lanes share a mean": (
        "slots", before(lambda x, *rest: (x - 0.1 * x.mean(0, keepdim=True), *rest)),
    ),
    "a token read alone decays no state": (
        "stream", before(lambda x, s, *rest: (x, s * (1 + 0.1 * (x.shape[1] == 1)), *rest)),
    ),
    "a state misses the last token": ("segments", state_before_the_last_token),
    "a token sees the next one": (
        "segments", before(lambda x, *rest: (x + 0.1 * x.roll(-1, 1), *rest)),
    ),
    "a state grows": ("long", state_after(lambda after, state: after + 2 * state)),
    "half precision drops the state": (
        "bf16", before(lambda x, s, *rest: (x, s * (x.dtype != torch.bfloat16), *rest)),
    ),
    "a lane carries more than its facts say": ("lane bytes", longer_tail),
    "tensors are kept that the facts do not count": (
        "bytes", before(lambda x, *rest: (x.exp().log().exp().log().exp().log(), *rest)),
    ),
}  # fmt: skip


def leaky(leak: Leak) -> type[nn.Module]:
    class Leaky(deltanet.GatedDeltaNet):
        def forward(self, *inputs: Any) -> Any:
            return leak(super().forward, self, *inputs)

    return Leaky


def drawn(kind: str = "deltanet") -> check.Subject:
    torch.manual_seed(1)
    numbers = torch.Generator().manual_seed(1)
    return check.Subject(check._drawn_config(kind, {}, numbers), numbers)


def passes(name: str) -> bool:
    (result,) = check.checked({name: check.CHECKS[name]}, drawn())
    return result.passed


@pytest.mark.parametrize("breaks", LEAKS)
def test_a_check_sees_the_leak_that_it_is_for(breaks, monkeypatch):
    name, leak = LEAKS[breaks]
    monkeypatch.setattr("pretrain.model.layer.mixer_class", lambda _: leaky(leak))
    assert not passes(name)


def test_a_state_that_is_a_slice_of_all_states_is_kept_alone(monkeypatch):
    slices = state_after(lambda after, _: torch.stack([after, after], 1)[:, 1])
    monkeypatch.setattr("pretrain.model.layer.mixer_class", lambda _: leaky(slices))
    assert passes("lane bytes")
    _, *memory = drawn().result()
    assert {part.untyped_storage().nbytes() - part.nbytes for part in memory} == {0}


def test_a_layer_that_keeps_nothing_beside_its_input_is_compared_with_its_size(monkeypatch):
    monkeypatch.setattr(type(mixer_facts("deltanet")), "kept_bytes", lambda *_: LayerBytes(0.0))
    (result,) = check.checked({"bytes": check.CHECKS["bytes"]}, drawn())
    assert not result.passed
    assert "0 by the facts" in result.description


def test_a_convolution_across_documents_is_seen(monkeypatch):
    monkeypatch.setattr(
        deltanet, "convolved", lambda rows, weight, _: convolved(rows, weight, None)
    )
    assert not passes("isolation")


# What facts say wrong -> the check that must see it, their method, and its wrong answer.
FACTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "half the FLOPs": (
        "flops", "flops", lambda right, *_: right._replace(
            forward={"deltanet": right.forward["deltanet"] / 2}
        ),
    ),
    "FLOPs that grow with tokens instead of channels": (
        "more flops", "flops", lambda right, model, segment: right._replace(
            forward={"deltanet": right.forward["deltanet"] * segment.tokens / 2 / model.d_model}
        ),
    ),
    "FLOPs saved in every segment": (
        "more flops", "flops", lambda right, _, segment: right._replace(
            saved=right.saved * segment.gradient_segments
        ),
    ),
    "an eighth less kept": (
        "bytes", "kept", lambda right, *_: type(right)(*(count * 7 / 8 for count in right)),
    ),
    "states and their products kept in bf16": (
        "bf16 bytes", "kept", lambda right, *_: right._replace(
            activations=right.activations + right.exact, exact=0
        ),
    ),
    "matrices that are vectors": (
        "parameters", "weights", lambda right, *_: {
            name: weight._replace(role="vector") for name, weight in right.items()
        },
    ),
    "vectors that are matrices": (
        "parameters", "weights", lambda right, *_: {
            name: weight._replace(role="matrix") for name, weight in right.items()
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", FACTS)
def test_a_check_sees_the_wrong_fact_that_it_is_for(wrong, monkeypatch):
    name, method, change = FACTS[wrong]
    facts = type(mixer_facts("deltanet"))
    right = getattr(facts, method)
    monkeypatch.setattr(facts, method, lambda self, *of: change(right(self, *of), *of))
    assert not passes(name)


@pytest.mark.parametrize("seed", range(6))
def test_shapes_are_drawn_until_the_facts_accept_the_settings(seed):
    settings = {"mixers": {"mamba2": {"groups": 4}}}
    assert (
        check._drawn_config("mamba2", settings, torch.Generator().manual_seed(seed)).num_heads == 2
    )


def test_isolation_is_not_applicable_where_documents_are_not_isolated():
    checks = check.check_mixer("deltanet", {"isolate_documents": False})
    assert all(result.passed for result in checks)
    unasked = [result.name for result in checks if "not applicable" in result.description]
    assert unasked == ["isolation", "starts"]


def test_unnormalized_sums_may_grow_linearly(monkeypatch):
    """The state is a sum of positive writes; a segment of 1000 tokens adds the same each time."""

    def counting(forward: Any, _: Any, *inputs: Any):
        output, state, tail = forward(*inputs)
        return output, inputs[1] + inputs[0].shape[1] * torch.ones_like(state), tail

    monkeypatch.setattr("pretrain.model.layer.mixer_class", lambda _: leaky(counting))
    assert passes("long")


def test_a_first_error_is_one_line_with_the_drawn_sizes(monkeypatch, capsys):
    def failing(*_: Any):
        raise RuntimeError("unflatten")

    monkeypatch.setattr("pretrain.model.layer.mixer_class", lambda _: leaky(failing))
    assert main(["check-mixer", "deltanet"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "unflatten; with d_model=" in lines[0]


def test_a_module_with_another_parameter_than_its_facts_ends_in_one_line(monkeypatch, capsys):
    class More(deltanet.GatedDeltaNet):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.more = nn.Parameter(torch.zeros(3))

    monkeypatch.setattr("pretrain.model.layer.mixer_class", lambda _: More)
    assert main(["check-mixer", "deltanet"]) == 1
    assert "more has shape (3,) in the module and None" in capsys.readouterr().out


def test_the_command_prints_a_line_for_each_check_and_refuses_what_is_no_kind(capsys):
    assert main(["check-mixer", "kda", "--seed", "3"]) == 0
    assert capsys.readouterr().out.count("\n") == len(check.CHECKS) + 1
    for arguments in (
        ["ema2"],
        ["mamba2", "model.mixers.mamba2.groups=5"],
        ["mamba2", "optim.a=1"],
    ):
        assert main(["check-mixer", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_no_kind_but_the_default_is_named_outside_of_its_folder():
    for path in (ROOT / "pretrain").rglob("*.py"):
        if path.is_relative_to(ROOT / "pretrain" / "mixers"):
            continue
        for kind in set(kinds_here()) - {"attention"}:
            assert not re.search(rf"{kind}", path.read_text(), re.IGNORECASE), (path, kind)


def normed(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def channels_of(x: Tensor, weight: Tensor, bias: Any = 0.0) -> Tensor:
    """The causal convolution of one lane [L, Y], and SiLU, from the definition."""
    taps = len(weight)
    padded = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    sums = [(padded[t : t + taps] * weight[:, 0]).sum(0) for t in range(len(x))]
    return silu(torch.stack(sums) + bias)


def delta_by_definition(layer: Any, x: Tensor, heads: int, keys: int, most: float = 1.0) -> Tensor:
    """The gated delta rule of heads with keys of this width, or with a decay for each channel."""
    w = [getattr(layer, f"{name}_weight") for name in ("query", "key", "value", "decay", "write")]
    mixed = channels_of(torch.cat([x @ each.T for each in w[:3]], 1), layer.convolution_weight)
    q, k, v = mixed.split([len(each) for each in w[:3]], dim=1)
    q, k, v = (
        each.reshape(len(x), -1, width)
        for each, width in ((q, keys), (k, keys), (v, len(w[2]) // heads))
    )
    q, k, own = normed(q) * keys**-0.5, normed(k), heads // q.shape[1]
    gates = softplus(x @ w[3].T + layer.decay_bias, threshold=100).reshape(len(x), heads, -1)
    alpha = (-layer.decay_rate.exp()[:, None] * gates).exp()
    beta, read = most * (x @ w[4].T).sigmoid(), torch.zeros_like(v)
    for n in range(heads):
        S = torch.zeros(keys, v.shape[-1]).double()
        for t in range(len(x)):
            key = k[t, n // own]
            S = alpha[t, n][:, None] * S
            S = S + beta[t, n] * torch.outer(key, v[t, n] - S.T @ key)
            read[t, n] = S.T @ q[t, n // own]
    gate = x @ layer.gate_weight.T
    gate = gate.sigmoid() if alpha.shape[-1] > 1 else silu(gate)
    return (layer.output_norm(read).flatten(1) * gate) @ layer.output_weight.T


def mamba_by_definition(layer: Any, x: Tensor, heads: int, width: int) -> Tensor:
    weights = [getattr(layer, f"{name}_weight") for name in ("value", "key", "query")]
    mixed = torch.cat([x @ each.T for each in weights], 1)
    mixed = channels_of(mixed, layer.convolution_weight, layer.convolution_bias)
    v, B, C = mixed.split([len(each) for each in weights], dim=1)
    v, B, C = (
        v.reshape(len(x), heads, -1),
        B.reshape(len(x), -1, width),
        C.reshape(len(x), -1, width),
    )
    step = softplus(x @ layer.step_weight.T + layer.step_bias, threshold=100)
    decay, read, own = (
        (-layer.decay_rate.exp() * step).exp(),
        torch.zeros_like(v),
        heads // B.shape[1],
    )
    for n in range(heads):
        S = torch.zeros(width, v.shape[-1]).double()
        for t in range(len(x)):
            S = decay[t, n] * S + step[t, n] * torch.outer(B[t, n // own], v[t, n])
            read[t, n] = S.T @ C[t, n // own] + layer.skip[n] * v[t, n]
    gated = read.flatten(1) * silu(x @ layer.gate_weight.T)
    root = (gated.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return (gated / root * layer.output_norm.gain) @ layer.output_weight.T


WIDE = {"key_width": 5, "value_width": 3, "key_heads": 2, "largest_write": 2.0}
DEFINITIONS: list[tuple[str, dict[str, Any], Callable[..., Tensor]]] = [
    ("kda", {}, lambda layer, x: delta_by_definition(layer, x, 4, 6)),
    ("deltanet", {}, lambda layer, x: delta_by_definition(layer, x, 4, 6)),
    ("deltanet", WIDE, lambda layer, x: delta_by_definition(layer, x, 4, 5, most=2.0)),
    ("mamba2", {}, lambda layer, x: mamba_by_definition(layer, x, 8, 12)),
    (
        "mamba2",
        {"state_width": 5, "groups": 4},
        lambda layer, x: mamba_by_definition(layer, x, 8, 5),
    ),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "settings", "definition"), DEFINITIONS)
def test_a_layer_computes_its_papers_recurrence(kind, settings, definition):
    sizes = {"d_model": 10, "num_heads": 4, "d_head": 6, "layer_kinds": (kind,)}
    model = ModelConfig(vocab_size=8, num_layers=1, **sizes, mixers={kind: settings})
    layer, numbers = mixer_class(kind)(model, 0).double(), torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=numbers).double())
    x_BLD = torch.randn(2, 100, 10, generator=numbers).double()
    parts = [torch.zeros(2, *each.shape).double() for each in mixer_facts(kind).states(model)]
    expected = torch.stack([definition(layer, x_LD) for x_LD in x_BLD])
    torch.testing.assert_close(layer(x_BLD, *parts, None)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.fixture
def ema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's layer, in a package that is installed beside this one."""
    page = (ROOT / "docs" / "your-layer.md").read_text()
    folder = tmp_path / "my_layers" / "ema"
    folder.mkdir(parents=True)
    facts, module = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (folder / "facts.py").write_text(facts)
    (folder / "module.py").write_text(module)
    about = tmp_path / "my_layers-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-layers\nVersion: 1.2\n")
    points = re.findall(r"^\[project.entry-points.\"(.*?)\"\]\n(\w+) = \"(.*?)\"", page, re.M)
    (about / "entry_points.txt").write_text("".join(f"[{a}]\n{b} = {c}\n" for a, b, c in points))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("my_layers")]:
        del sys.modules[name]
    mixer_facts.cache_clear()


def test_the_pages_layer_passes_all_checks_from_another_package(ema, capsys):
    assert main(["check-mixer", "ema"]) == 0, capsys.readouterr().out
    assert mixer_facts("ema").distribution == "my-layers 1.2"


def test_a_kind_that_is_not_installed_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'ema'.*attention, deltanet.*xl_pretrain\.mixers"):
        ModelConfig(layer_kinds=("ema",))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("facts.py", '    title = "EMA"\n', "", "EmaFacts needs title"),
        ("facts.py", "def kept(", "def keeps(", "EmaFacts needs kept"),
        (
            "facts.py",
            "class EmaFacts",
            "class More(Mixer):\n    pass\n\n\nclass EmaFacts",
            "2 classes of Mixer",
        ),
        (
            "facts.py",
            "class EmaFacts",
            "import nothing_of_this_name\n\n\nclass EmaFacts",
            "ModuleNotFoundError",
        ),
        ("module.py", "import torch\n", "import nothing_of_this_name\n", "ModuleNotFoundError"),
        ("module.py", "class Ema(", "class Other(", "found no Ema"),
        (
            "module.py",
            "output_weight), mean_BD",
            "output_weight),",
            "returned 0 of 1 states",
        ),
    ],
)
def test_an_unfinished_layer_ends_in_one_line(ema, tmp_path, capsys, file, old, new, message):
    path = tmp_path / "my_layers" / "ema" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert main(["check-mixer", "ema"]) != 0
    lines = "".join(capsys.readouterr()).splitlines()
    assert message in lines[0]
    assert len(lines) <= 2


def test_a_kind_is_an_identifier_that_is_not_one_of_ours(ema, tmp_path, capsys):
    points = tmp_path / "my_layers-1.2.dist-info" / "entry_points.txt"
    points.write_text("[xl_pretrain.mixers]\ndeltanet = my_layers.ema\nmin-gru = my_layers.ema\n")
    for kind, message in (("deltanet", "rename the entry point"), ("min-gru", "an identifier")):
        assert main(["check-mixer", kind]) == 2
        assert message in capsys.readouterr().err


def test_the_environment_has_the_version_and_the_code_of_anothers_layer(ema, tmp_path):
    run = RunConfig(model=ModelConfig(layer_kinds=("ema",)))
    before = own_environment(torch.device("cpu"), run)["layers of kind ema"]
    assert re.fullmatch(r"my-layers 1\.2\+[0-9a-f]{12}", before)
    (tmp_path / "my_layers" / "helper.py").write_text("changed = True\n")
    assert own_environment(torch.device("cpu"), run)["layers of kind ema"] != before
