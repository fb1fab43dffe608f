"""`pretrain generate`: text sampled from a trained model. The prompt goes in by segments, then token by token.

Each token costs one forward pass of length 1 against cached keys and values, however long the text has become: that is
what the recurrence is for. B samples, L tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_pipeline.errors import ConfigError
from data_pipeline.tokenizer import Tokenizer
from pretrain.model.cached import new_stream
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.trained_model import inference_device, load_tokenizer, load_trained


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the model's distribution."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # among so many likeliest tokens only; 0: all
    repetition_penalty: float = (
        1.0  # tokens of the text so far become so many times less likely; 1: no change
    )
    top_p: float = 1.0  # among the fewest tokens that hold this share of the probability

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be 0 or more, and a number")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 1.0 <= self.repetition_penalty < math.inf:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty} must be 1 or more, and a number"
            )


@torch.no_grad()
def generate(
    module: TransformerXL,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    num_tokens: int,
    end_id: int,
    num_samples: int = 1,
    seed: int = 0,
    memory_length: int | None = None,
    segment_length: int = 128,
) -> Iterator[Tensor]:
    """Yield the next token of every sample, [B], `num_tokens` times; the same seed gives the same tokens.

    The prompt needs one token at least; `end_id`, which closes a document, stands for the beginning of a text. There
    are no empty documents: `end_id` never follows itself.
    """
    assert len(prompt) > 0
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    module.eval()
    tokens_BL = torch.tensor([prompt] * num_samples, device=device)
    starts_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
    starts_BL[:, 1:] = tokens_BL[:, :-1] == end_id
    length = module.config.memory_length if memory_length is None else memory_length
    length = min(length, len(prompt) + num_tokens)  # what can be remembered at all
    stream = new_stream(module, length, min(segment_length, tokens_BL.shape[1]))
    logits_BLV = tokens_BL
    seen_BV = seen_tokens(tokens_BL.cpu(), module.config.vocab_size)
    last_B = tokens_BL[:, -1].cpu()
    for begin in range(0, tokens_BL.shape[1], segment_length):
        part = slice(begin, begin + segment_length)
        logits_BLV = stream.logits_BLV(tokens_BL[:, part], starts_BL[:, part], 1)
    for remaining in reversed(range(num_tokens)):
        seen_BV[:, end_id] = False  # every document ends
        logits_BV = penalized(logits_BLV[:, -1].float().cpu(), seen_BV, sampling.repetition_penalty)
        logits_BV[last_B == end_id, end_id] = -math.inf
        yield (tokens_B := choose(logits_BV, sampling, generator))
        seen_BV.scatter_(1, tokens_B[:, None], True)
        last_B = tokens_B
        if remaining:
            starts_BL, tokens_BL = tokens_BL[:, -1:] == end_id, tokens_B[:, None].to(device)
            logits_BLV = stream.logits_BLV(tokens_BL, starts_BL)


def seen_tokens(tokens_BL: Tensor, vocab_size: int) -> Tensor:
    """Which tokens of the vocabulary occur in each row, [B, V]."""
    return torch.zeros(len(tokens_BL), vocab_size, dtype=torch.bool).scatter_(1, tokens_BL, True)


def penalized(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Log-probabilities, not normalised, in which every token seen is `penalty` times less likely."""
    return logits_BV - math.log(penalty) * seen_BV


def choose(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token per row, [B], on the CPU."""
    logits_BV = logits_BV.float().cpu()
    if sampling.temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    # From the likeliest one and in float64: the coldest temperature leaves zeros, not numbers too large to hold.
    below_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)).double()
    sorted_BV, tokens_BV = (below_BV / sampling.temperature).sort(
        dim=-1, descending=True, stable=True
    )
    probabilities_BV = sorted_BV.softmax(dim=-1)
    if sampling.top_k:
        probabilities_BV[:, sampling.top_k :] = 0.0
    # A token stays while those before it hold less than top_p: the likeliest one always stays.
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    total_B1 = probabilities_BV.sum(dim=-1, keepdim=True)
    probabilities_BV[before_BV >= sampling.top_p * total_B1] = 0.0
    rank_B1 = torch.multinomial(probabilities_BV, 1, generator=generator)
    return tokens_BV.gather(1, rank_B1).squeeze(1)


class TextStream:
    """Turns tokens into text as they come; a character whose bytes are not all there yet waits for the rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """The text that `token` adds; an end of document shows as a line of its own."""
        if token == self._tokenizer.end_id:
            rest = self.rest()
            return f"{rest}\n----\n"
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending)
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        if new.endswith(
            "\n"
        ):  # no piece crosses a newline: what came before need not be decoded again
            self._pending, self._shown = [], ""
        return new

    def rest(self) -> str:
        """What is still waiting."""
        text = self._tokenizer.decode(self._pending)[len(self._shown) :]
        self._pending, self._shown = [], ""
        return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain generate`."""
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="directory of a run (its newest good checkpoint is used) or an export",
    )
    parser.add_argument(
        "--prompt", default="", help="text to go on from (default: the beginning of a document)"
    )
    parser.add_argument(
        "--data", type=Path, help="corpus whose tokenizer is used (default: the run's)"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, help="tokens to write (default %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0: the likeliest token (default %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="only the K likeliest tokens (default: all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="probability kept (default %(default)s)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="tokens of the text so far are so many times less likely (default: 1)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="the same seed gives the same text (default %(default)s)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="texts to write at once, shown when done (default %(default)s)",
    )
    parser.add_argument(
        "--memory-length", type=int, metavar="N", help="tokens remembered (default: as in training)"
    )
    parser.add_argument(
        "--ema", action="store_true", help="the running average of the weights, if the run kept one"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and what the model makes of it: one sample as it is written, several one after another."""
    if arguments.tokens < 1 or arguments.samples < 1 or (arguments.memory_length or 0) < 0:
        raise ConfigError("--tokens and --samples must be 1 or more, --memory-length 0 or more")
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed {arguments.seed} must be from 0 to 2^63 - 1")
    if (
        not arguments.prompt.isprintable()
        and arguments.prompt != arguments.prompt.encode(errors="replace").decode()
    ):
        raise ConfigError("--prompt holds bytes that are no UTF-8 text; give text")
    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    trained = load_trained(
        arguments.run,
        inference_device(),
        say=lambda text: print(text, file=sys.stderr),
        ema=arguments.ema,
    )
    tokenizer = load_tokenizer(trained, arguments.data or trained.tokenizer_home)
    memory_length = (
        trained.config.model.memory_length
        if arguments.memory_length is None
        else arguments.memory_length
    )
    tokens = generate(
        trained.module,
        prompt_tokens(tokenizer, arguments.prompt),
        sampling=sampling,
        num_tokens=arguments.tokens,
        end_id=tokenizer.end_id,
        num_samples=arguments.samples,
        seed=arguments.seed,
        memory_length=memory_length,
        segment_length=trained.segment_length,
    )
    if arguments.samples == 1:
        _print_as_it_comes(tokens, tokenizer, arguments.prompt)
    else:
        _print_samples(tokens, tokenizer, arguments.prompt)
    return 0


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The prompt as the beginning of a document: after the end of another one, as in training."""
    return [tokenizer.end_id, *map(int, tokenizer.encode(text))]


def _print_as_it_comes(tokens: Iterator[Tensor], tokenizer: Tokenizer, prompt: str) -> None:
    stream = TextStream(tokenizer)
    print(prompt, end="", flush=True)
    for tokens_B in tokens:
        print(stream.add(int(tokens_B[0])), end="", flush=True)
    print(stream.rest(), flush=True)


def _print_samples(tokens: Iterator[Tensor], tokenizer: Tokenizer, prompt: str) -> None:
    written: list[Tensor] = []
    try:
        written.extend(tokens)
    finally:  # what there is, if it was interrupted
        _print_whole(written, tokenizer, prompt)


def _print_whole(written: Sequence[Tensor], tokenizer: Tokenizer, prompt: str) -> None:
    samples_BT = torch.stack(list(written), dim=1).tolist() if written else []
    for number, sample in enumerate(samples_BT, start=1):
        stream = TextStream(tokenizer)
        text = "".join(stream.add(token) for token in sample) + stream.rest()
        print(f"==== sample {number} of {len(samples_BT)}\n{prompt}{text}")
