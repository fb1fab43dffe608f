"""`pretrain generate`: sample text from a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from data_pipeline.tokenizer import Tokenizer
from foundation.cli import check_least
from foundation.errors import ConfigError, printable
from foundation.sizes import size_of
from pretrain.config.model import Precision
from pretrain.distributed.threads import set_threads
from pretrain.rundir.run_paths import run_path

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_PROMPT_BYTES = 1 << 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain generate`."""
    add, tokens = parser.add_argument, size_of("tokens")
    add("run", type=run_path, metavar="RUN", help="run, RUN@STEP, its name in runs/, or export")
    prompt = parser.add_mutually_exclusive_group().add_argument
    prompt("--prompt", default="", help="text to continue (default: start a document)")
    prompt("--prompt-file", type=Path, metavar="FILE", help="file of the prompt; -: standard input")
    add("--data", type=Path, help="corpus whose tokenizer is used (default: the run's)")
    add("--tokens", type=tokens, default=200, help="tokens to generate (default %(default)s)")
    add("--temperature", type=float, default=0.8, help="0: likeliest token (default %(default)s)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from K likeliest (default: all)")
    add("--top-p", type=float, default=0.95, metavar="P", help="draw from the likeliest, P in sum")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="of tokens seen before")
    add("--seed", type=int, default=1, help="a seed fixes the text (default %(default)s)")
    add("--samples", type=int, default=1, metavar="N", help="texts; several are printed at the end")
    add("--memory-length", type=tokens, metavar="N", help="default: as in training")
    add("--precision", choices=get_args(Precision), help="default: the run's; on a CPU fp32")
    add("--ema", action="store_true", help="use the weight EMA, if the run has one")


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and its continuation: one sample as it is generated, several at the end."""
    _take_prompt_file(arguments)
    _check(arguments)
    # Late: torch takes seconds.
    from pretrain.evaluation.sampling import Sampling, generate, prompt_tokens
    from pretrain.weights.export import inference_device, load_tokenizer, load_trained

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    options = {"ema": arguments.ema, "precision": arguments.precision}
    trained = load_trained(arguments.run, inference_device(), **options)
    set_threads(0)
    tokenizer = load_tokenizer(trained, arguments.data)
    tokens = generate(
        trained.module,
        prompt_tokens(tokenizer, arguments.prompt),
        sampling=sampling,
        num_tokens=arguments.tokens,
        end_id=tokenizer.end_id,
        num_samples=arguments.samples,
        seed=arguments.seed,
        memory_length=arguments.memory_length,
        segment_length=trained.segment_length,
        end_repeats=bool(tokenizer.end_text),
    )
    print_samples = _print_streaming if arguments.samples == 1 else _print_at_end
    print_samples(tokens, tokenizer, arguments.prompt)
    return 0


def _take_prompt_file(arguments: argparse.Namespace) -> None:
    """Read the prompt from the file that was named, if any; ConfigError if it is not UTF-8 text."""
    file: Path | None = arguments.prompt_file
    if file is None:
        return
    try:
        with open(0 if str(file) == "-" else file, "rb", closefd=str(file) != "-") as opened:
            content = opened.read(_LARGEST_PROMPT_BYTES + 1)
        if len(content) > _LARGEST_PROMPT_BYTES:
            raise ConfigError(f"--prompt-file {file} has more than {_LARGEST_PROMPT_BYTES:,} bytes")
        arguments.prompt = content.decode()
    except OSError as error:
        raise ConfigError(f"--prompt-file {file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompt-file {file} contains bytes that are not UTF-8") from None


def _check(arguments: argparse.Namespace) -> None:
    check_least(arguments, 1, "tokens", "samples")
    check_least(arguments, 0, "memory_length")
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed {arguments.seed} must be from 0 to 2^63 - 1")
    prompt = arguments.prompt
    if not prompt.isprintable() and prompt != prompt.encode(errors="replace").decode():
        raise ConfigError("--prompt contains bytes that are not UTF-8; give text")


def _shown(text: str) -> str:
    """Return the text; for a terminal with its escape sequences spelled out."""
    return printable(text) if sys.stdout.isatty() else text


def _print_streaming(tokens: Iterator[Tensor], tokenizer: Tokenizer, prompt: str) -> None:
    from pretrain.evaluation.sampling import TextStream

    stream = TextStream(tokenizer)
    print(_shown(prompt), end="", flush=True)
    for tokens_B in tokens:
        print(_shown(stream.add(int(tokens_B[0]))), end="", flush=True)
    print(_shown(stream.rest()), flush=True)


def _print_at_end(tokens: Iterator[Tensor], tokenizer: Tokenizer, prompt: str) -> None:
    import torch

    from pretrain.evaluation.sampling import TextStream

    generated: list[Tensor] = []
    try:
        generated.extend(tokens)
    finally:  # if interrupted, print what there is
        samples_BT = torch.stack(generated, dim=1).tolist() if generated else []
        for number, sample in enumerate(samples_BT, start=1):
            stream = TextStream(tokenizer)
            text = "".join(map(stream.add, sample)) + stream.rest()
            print(_shown(f"==== sample {number} of {len(samples_BT)}\n{prompt}{text}"))
