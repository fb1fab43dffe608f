import pytest
import torch

from data_pipeline.builder.build_tokenizer import train_tokenizer
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError
from pretrain.evaluation.sampling import (
    Sampling,
    TextStream,
    choose,
    generate,
    penalized,
    prompt_tokens,
    seen_tokens,
)
from pretrain.model.memory import document_starts
from tests.helpers.models import TINY, VARIANTS, tiny_model

END = 16
PROMPT = [END, 3, 1, 4, 1, 5, 9, 2, 6]


def tokens_of(model, sampling: Sampling, num_tokens: int, **options: int) -> torch.Tensor:
    settings = {"sampling": sampling, "num_tokens": num_tokens, "end_id": END, **options}
    return torch.stack(list(generate(model, PROMPT, **settings)), 1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "segment_length"),
    [
        *((name, (4, 100, 1)[place % 3]) for place, name in enumerate(VARIANTS)),
        *((name, 1) for name in ("memory_tokens", "compressive_rope", "deltanet")),
    ],
)
def test_greedy_generation_equals_passes_over_the_growing_text(variant, segment_length):
    """In segments from the start: only what memory tokens write depends on where these end."""
    model = tiny_model(**{**VARIANTS[variant], "memory_length": 64}).eval()
    varied = Sampling(temperature=0.0, repetition_penalty=1e30)  # only ends twice
    generated = tokens_of(model, varied, 20, segment_length=segment_length)[0].tolist()
    text = torch.tensor([[*PROMPT, *generated]])
    memory, found = None, []
    starts = document_starts(text, END).split(segment_length, 1)
    for part in zip(text.split(segment_length, 1), starts, strict=True):
        logits_BLV, memory = model.logits_BLV(part[0], memory, part[1])
        found.append(logits_BLV)
    logits_BTV = torch.cat(found, dim=1)
    for place, token in enumerate(generated, len(PROMPT)):
        seen_BV = seen_tokens(text[:, :place], TINY.vocab_size)
        seen_BV[:, END] = False
        expected_BV = penalized(logits_BTV[:, place - 1], seen_BV, varied.repetition_penalty)
        expected_BV[text[:, place - 1] == END, END] = -torch.inf  # no empty documents
        assert token == int(expected_BV.argmax())
    assert len(set(generated)) > 9, "a constant answer would prove little"


def test_the_same_seed_gives_the_same_samples_and_another_seed_others():
    model = tiny_model(tie_embeddings=False, memory_length=64).eval()
    first = tokens_of(model, Sampling(), 12, seed=1, num_samples=3)
    assert torch.equal(first, tokens_of(model, Sampling(), 12, seed=1, num_samples=3))
    assert not torch.equal(first, tokens_of(model, Sampling(), 12, seed=2, num_samples=3))
    assert not torch.equal(first[0], first[1])


def test_samples_follow_the_distribution_within_top_k_and_top_p():
    logits_BV = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]])).expand(4000, -1)

    def shares(sampling: Sampling) -> list[float]:
        tokens = choose(logits_BV, sampling, torch.Generator().manual_seed(0))
        return (torch.bincount(tokens, minlength=4) / len(tokens)).tolist()

    assert shares(Sampling()) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)
    assert shares(Sampling(top_k=2)) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.03)
    assert shares(Sampling(top_p=0.8)) == pytest.approx([5 / 9, 2.5 / 9, 1.5 / 9, 0], abs=0.03)
    assert shares(Sampling(top_p=0.01)) == [1, 0, 0, 0]
    assert shares(Sampling(temperature=0.5))[0] == pytest.approx(0.25 / 0.345, abs=0.03)
    for lowest in (0.0, 1e-320, 1e-3):
        assert shares(Sampling(temperature=lowest)) == [1, 0, 0, 0]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_streamed_text_is_the_text_of_all_tokens(kind):
    text = 'def naïve(x):\n    """Zwölf Boxkämpfer → 日本."""\n\n    return x\n'
    tokenizer = Tokenizer("bytes")
    if kind == "bpe":
        tokenizer = train_tokenizer("bpe", 300, ["def naive(x): return 2\n" * 9])
    stream = TextStream(tokenizer)
    parts = [stream.add(token) for token in prompt_tokens(tokenizer, text)[1:]]
    assert "".join(parts) + stream.rest() == text
    assert "\ufffd" not in "".join(parts)
    assert sum(map(bool, parts)) > 20, "the text comes in pieces"


def test_an_end_of_document_shows_as_a_line():
    stream = TextStream(Tokenizer("bytes"))
    assert [stream.add(token) for token in (ord("a"), 256, ord("b"))] == ["a", "\n----\n", "b"]


def test_the_penalty_divides_the_probability_of_tokens_seen_and_no_others():
    logits_BV = torch.tensor([[0.5, 0.3, 0.2]]).log()
    seen_BV = torch.tensor([[True, False, True]])
    found_BV = penalized(logits_BV, seen_BV, 2.0).exp()
    torch.testing.assert_close(found_BV, torch.tensor([[0.25, 0.3, 0.1]]))
    assert torch.equal(penalized(logits_BV, seen_BV, 1.0), logits_BV)


def test_no_end_follows_an_end():
    """A model that wants nothing but ends writes one between any two tokens, not a text of ends."""
    module = tiny_model(tie_embeddings=False, memory_length=64).eval()
    with torch.no_grad():
        module.get_parameter("head.bins.0.bias")[END] = 1e3
    tokens = list(generate(module, [3, END], sampling=Sampling(), num_tokens=6, end_id=END))
    assert [int(token[0]) == END for token in tokens] == [False, True, False, True, False, True]


@pytest.mark.parametrize(
    "setting",
    ["repetition_penalty=0.5", "temperature=nan", "temperature=inf", "top_p=2.0", "top_k=-1"],
)
def test_impossible_samplings_are_refused_by_name(setting):
    name, value = setting.split("=")
    with pytest.raises(ConfigError, match=f"^{setting}"):
        Sampling(**{name: int(value) if name == "top_k" else float(value)})
