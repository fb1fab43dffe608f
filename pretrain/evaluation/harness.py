"""A trained model for lm-eval, EleutherAI's evaluation harness, and the run of its tasks.

lm-eval is an extra, so this module is imported when tasks run. Importing it registers the model as
`xl-pretrain`. A context of any length is read whole, segment by segment; memory caches keys and
values, so time is linear in the length. Letters of shapes as in `pretrain.model`.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager, _yaml_loader
from rich.console import Console
from rich.progress import track

from foundation.errors import ConfigError, DataError
from foundation.files import YAML_SUFFIXES
from pretrain.config.model import Precision
from pretrain.evaluation.sampling import Sampling, generate, prompt_tokens
from pretrain.model.cached import new_stream
from pretrain.model.memory import document_starts
from pretrain.weights.export import TrainedModel, load_tokenizer, load_trained

T = TypeVar("T")
Request = tuple[tuple[str, str], list[int], list[int]]  # texts; tokens of context and continuation
DEFAULT_NEW_TOKENS = 256  # lm-eval's default
# lm-eval's names for the largest number of new tokens.
NAMES_OF_LENGTH = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("xl-pretrain")
class TrainedLM(TemplateLM):
    """Scores and continues texts, each read after an end-of-document token, as in training."""

    def __init__(
        self,
        run: TrainedModel | Path | str,
        data: Path | str | None = None,
        memory_length: int | None = None,
        segment_length: int | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        precision: Precision | None = None,
        before_batch: Callable[[], None] = lambda: None,
        **others: Any,
    ) -> None:
        """By default memory and segments are as long as in training.

        `precision` is passed to `load_trained`. `before_batch` is called before each batch of
        texts, and may raise.
        """
        super().__init__()
        if precision not in (None, *get_args(Precision)):
            raise ConfigError(f"precision={precision}: expected {', '.join(get_args(Precision))}")
        if not isinstance(run, TrainedModel):
            run = load_trained(run, torch.device(device) if device else None, precision=precision)
        if others.pop("max_batch_size", None) or others or not str(batch_size).isdecimal():
            raise ConfigError(
                f"batch_size={batch_size} {others or ''}: expected a number of texts, and no other "
                "arguments than run, data, memory_length, segment_length, device and precision"
            )
        self._trained = run
        self._before_batch = before_batch
        self._tokenizer = load_tokenizer(run, Path(data) if data else None)
        trained_length = run.config.model.longest_memory
        self._memory_length = trained_length if memory_length is None else int(memory_length)
        self._segment_length = int(segment_length or run.segment_length)
        self._batch_size = int(batch_size)
        self._device = next(run.module.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_id

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        tokens = prompt_tokens(self._tokenizer, string)
        return tokens[1:] if add_special_tokens is False else tokens

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(list(requests), disable_tqdm=True)  # the bar is ours

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **options: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of every continuation, and whether each token is the likeliest.

        Texts of similar length are read together.
        """
        order = sorted(range(len(requests)), key=lambda index: -_length(requests[index]))
        scores: dict[int, tuple[float, bool]] = {}
        for start in _with_progress(range(0, len(order), self._batch_size), "batches scored"):
            self._before_batch()
            batch = order[start : start + self._batch_size]
            scores |= zip(batch, self._scores([requests[index] for index in batch]), strict=True)
        return [scores[index] for index in range(len(requests))]

    @torch.no_grad()
    def _scores(self, requests: Sequence[Request]) -> Iterator[tuple[float, bool]]:
        longest = max(map(_length, requests))
        # Padding is on the right, where no token of the text sees it.
        tokens_BT = torch.full((len(requests), longest), self.eot_token_id)
        for row, (_, context, continuation) in zip(tokens_BT, requests, strict=True):
            row[: len(context) + len(continuation)] = torch.tensor(context + continuation)
        tokens_BT = tokens_BT.to(self._device)
        starts_BT = document_starts(tokens_BT, self.eot_token_id)
        first = min(len(context) for _, context, _ in requests)
        length = min(self._segment_length, longest - 1)
        module = self._trained.module
        stream = new_stream(module, self._memory_length, self._segment_length, longest)
        scores_BT = torch.zeros(tokens_BT.shape, dtype=torch.float64)
        greedy_BT = torch.ones(tokens_BT.shape, dtype=torch.bool)
        for start in range(0, longest - 1, length):
            stop = min(start + length, longest - 1)
            # The logits at a position score the token after it.
            count = stop - max(start, first - 1)
            part = slice(start, stop)
            logits_BLV = stream.logits_BLV(tokens_BT[:, part], starts_BT[:, part], max(1, count))
            if count > 0:
                scored = slice(stop - count + 1, stop + 1)
                targets_BL = tokens_BT[:, scored]
                picked_BL = logits_BLV.gather(2, targets_BL[:, :, None]).squeeze(2)
                scores_BT[:, scored] = picked_BL.double().cpu()
                greedy_BT[:, scored] = (logits_BLV.argmax(-1) == targets_BL).cpu()
        for row, (_, context, continuation) in enumerate(requests):
            of_text = slice(len(context), len(context) + len(continuation))
            yield float(scores_BT[row, of_text].sum()), bool(greedy_BT[row, of_text].all())

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of every whole text, without the token that ends it."""
        texts = [request.args[0] for request in requests]
        encoded = [(text, self.tok_encode(text, add_special_tokens=False)) for text in texts]
        scores = iter(
            self._loglikelihood_tokens(
                [(("", text), [self.eot_token_id], tokens) for text, tokens in encoded if tokens]
            )
        )
        return [next(scores)[0] if tokens else 0.0 for _, tokens in encoded]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text after every context, up to a stop text or the end of the document."""
        shown = _with_progress(requests, "texts continued")
        return [self._continued(*request.args) for request in shown]

    def _continued(self, context: str, options: dict[str, Any]) -> str:
        self._before_batch()
        sampling, stops, num_tokens = _how_to_generate(options)
        tokens = generate(
            self._trained.module,
            prompt_tokens(self._tokenizer, context),
            sampling=sampling,
            num_tokens=num_tokens,
            end_id=self.eot_token_id,
            memory_length=self._memory_length,
            segment_length=self._segment_length,
        )
        ids: list[int] = []
        text = ""
        for token in map(int, tokens):
            ids.append(token)
            text = self._tokenizer.decode(ids)
            if token == self.eot_token_id or any(stop in text for stop in stops):
                break
        for stop in stops:
            text = text.split(stop)[0]
        return text


def _with_progress(items: Sequence[T], words: str) -> Iterable[T]:
    """Return the items, with a bar on a terminal."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    return track(items, words, console=console, transient=True, disable=hidden)


def _length(request: Request) -> int:
    return len(request[1]) + len(request[2])


def _how_to_generate(options: dict[str, Any]) -> tuple[Sampling, list[str], int]:
    """Return sampling, stops and the largest number of tokens; ConfigError for unknown options."""
    options = dict(options)
    until = options.pop("until", None) or []
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    lengths = [options.pop(name) for name in NAMES_OF_LENGTH if name in options]
    temperature = float(options.pop("temperature", 0.0) or 0.0)
    samples = options.pop("do_sample", temperature > 0.0)
    known = {name: options.pop(name) for name in ("top_k", "top_p") if name in options}
    if options:
        raise ConfigError(
            f"found the generation options {sorted(options)}; expected until, max_gen_toks, "
            "do_sample, temperature, top_k and top_p; remove the others from the task"
        )
    sampling = Sampling(temperature=temperature if samples else 0.0, **known)
    return sampling, stops, int(lengths[0]) if lengths else DEFAULT_NEW_TOKENS


def run_tasks(
    trained: TrainedModel,
    tasks: Sequence[str],
    *,
    limit: int = 0,
    few_shot: int | None = None,
    bootstrap_iters: int = 100_000,
    runs_code: bool = False,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Return the metrics of every task and group: `acc,none`, `acc_stderr,none`, ...

    A task is a name that lm-eval knows, or a YAML file, whose data may be local files. `limit` is
    how many examples of a task are used (0: all). `bootstrap_iters` samples give the standard
    errors (0: none). `options` are for `TrainedLM`. Without `runs_code`, DataError for `!function`
    in a file.
    """
    # The decorator that registers the class hides its arguments.
    model = TrainedLM(trained, **options)  # pyright: ignore[reportCallIssue]
    with _one_line("run", tasks), _functions(runs_code):
        output = simple_evaluate(
            model,
            tasks=list(tasks),
            task_manager=_manager(_needs_defaults(tasks)),
            limit=limit or None,
            num_fewshot=few_shot,
            log_samples=False,
            bootstrap_iters=bootstrap_iters,
        )
    assert output is not None  # it is None only on ranks above 0
    return {task: dict(metrics) for task, metrics in output.get("results", {}).items()}


def load_tasks(tasks: Sequence[str]) -> None:
    """Load tasks and their data; ConfigError or DataError if that fails or needs `!function`."""
    with _one_line("load", tasks), _functions(are_run=False):
        _manager(_needs_defaults(tasks)).load(list(tasks))


def _needs_defaults(tasks: Sequence[str]) -> bool:
    return not all(task.endswith(YAML_SUFFIXES) for task in tasks)


@functools.cache  # the index of lm-eval's own tasks takes seconds, in every evaluation of a run
def _manager(include_defaults: bool) -> TaskManager:
    return TaskManager(include_defaults=include_defaults)


@contextlib.contextmanager
def _functions(are_run: bool) -> Iterator[None]:
    """In the block, lm-eval runs or refuses the `!function` code of files that are not its own."""
    load, own = _yaml_loader._import_func_in_yml, Path(_yaml_loader.__file__).parent

    def load_trusted(name: str, folder: Path) -> Any:
        if are_run or folder.is_relative_to(own):
            return load(name, folder)
        raise ValueError(
            f"found !function {name}, which runs code; read it, then give --run-task-code to "
            "`pretrain evaluate`"
        )

    _yaml_loader._import_func_in_yml = load_trusted
    try:
        yield
    finally:
        _yaml_loader._import_func_in_yml = load


@contextlib.contextmanager
def _one_line(what: str, tasks: Sequence[str]) -> Iterator[None]:
    """Turn the many types of errors of tasks and their data into a DataError of one line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # lm-eval prints what it is doing
            yield
    except (KeyError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"lm-eval could not {what} {', '.join(tasks)}: {reason[:500]}") from error


def task_rows(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of a table, its header first."""
    rows = [("task", "metric", "filter", "value", "standard error")]
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, chosen = key.partition(",")
            if chosen and not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr,{chosen}")
                rows.append((task, name, chosen, _shown(value), _shown(error)))
    return rows


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "-"
