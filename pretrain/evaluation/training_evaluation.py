"""Evaluations while a run trains: validation losses, and tasks of lm-eval.

Rank 0 has the whole weights and runs the tasks. Before each batch of texts it sends the waiting
ranks a sign. So no watchdog takes their wait for a hang, and a request to stop ends the tasks on
all ranks at the same batch.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from data_pipeline.corpora.corpus import Corpus
from pretrain.config.run import RunConfig
from pretrain.distributed.collectives import broadcast_value
from pretrain.engines.engine import Engine
from pretrain.evaluation.evaluate import EvaluationResult, corpus_text_sizes, evaluate, logger
from pretrain.evaluation.task_names import check_tasks
from pretrain.model.adopted import LanguageModel
from pretrain.recovery.stop_requests import StopRequested
from pretrain.rundir.evaluated_text import MEASURED
from pretrain.rundir.metric_names import set_values, task_values
from pretrain.weights.export import TrainedModel


def training_evaluator(
    run: RunConfig,
    engine: Engine,
    sets: Mapping[str, Path] | None = None,
    before_corpus: Callable[[], None] = lambda: None,
    before_batch: Callable[[], None] = lambda: None,
) -> Callable[[int], dict[str, Any]]:
    """Return a function that measures the validation loss with the training memory and without.

    Its argument is how many tokens to score (0: all). It also measures the losses of `sets`, splits
    by name, with the training memory. Each measurement starts with empty memories, after a call of
    `before_corpus`.
    """
    validation = run.data.directory() / "validation"
    corpora = {
        directory: Corpus.open(directory, cache=run.data.cache)
        for directory in (validation, *(sets or {}).values())
    }

    # Loaded once: it takes a second, and thousands of ranks would read the file each time.
    sizes_of = functools.cache(corpus_text_sizes)

    def measure(
        max_tokens: int, memory_length: int, directory: Path = validation
    ) -> EvaluationResult:
        before_corpus()
        return evaluate(
            engine,
            corpora[directory],
            memory_length=memory_length,
            segment_length=run.data.segment_length,
            num_lanes=run.evaluation.lanes,
            max_tokens=max_tokens,
            before_batch=before_batch,
            text_sizes=sizes_of(corpora[directory]),
        )

    def values(max_tokens: int) -> dict[str, Any]:
        result = measure(max_tokens, run.model.longest_memory)
        without = result.loss if run.model.longest_memory == 0 else measure(max_tokens, 0).loss
        measured: dict[str, Any] = {name: result.values()[name] for name in MEASURED}
        measured["loss_without_memory"] = without
        known = {validation: result}  # one of the sets may be this same split
        for name, directory in (sets or {}).items():
            if directory not in known:
                known[directory] = measure(max_tokens, run.model.longest_memory, directory)
            measured |= set_values(name, known[directory].loss, known[directory].bits_per_byte)
        return measured

    return values


def check_training_tasks(run: RunConfig) -> None:
    """Raise ConfigError or DataError if the run's tasks, or their data, cannot be loaded."""
    if run.evaluation.tasks:
        check_tasks(run.evaluation.tasks)
        with kept_random_state():
            from pretrain.evaluation.harness import load_tasks  # late: lm-eval is an extra

            load_tasks(run.evaluation.tasks)


def training_tasks(
    run: RunConfig, engine: Engine, before_batch: Callable[[], None]
) -> Callable[[int], dict[str, float | None]]:
    """Return a function that measures the run's tasks after a step, as a collective.

    On rank 0 it returns the metrics, or {} if tasks fail; on other ranks it returns {}. Every rank
    calls `before_batch` before each batch of texts; it may raise. Weights, memories and random
    numbers stay as they are.
    """
    world = engine.world

    def tick() -> None:
        broadcast_value(True, bool)
        before_batch()

    def measure(step: int) -> dict[str, float | None]:
        if not world.is_main:
            while broadcast_value(False, bool):
                before_batch()
            return {}
        try:
            with kept_random_state(), evaluating(engine) as module:
                from pretrain.evaluation.harness import run_tasks

                trained = TrainedModel(module, run, step, run.data.directory())
                results = run_tasks(
                    trained,
                    run.evaluation.tasks,
                    limit=run.evaluation.tasks_limit,
                    bootstrap_iters=0,  # standard errors take longer than small tasks
                    memory_length=run.model.longest_memory,
                    segment_length=run.data.segment_length,
                    batch_size=run.evaluation.lanes,
                    before_batch=tick,
                )
        except StopRequested:
            raise  # all ranks raise it
        except Exception as error:  # training continues if lm-eval or a task fails
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            logger.warning("evaluation.tasks gave no results after step %d: %s", step, reason)
            results = {}
        broadcast_value(False, bool)
        return task_values(results)

    return measure


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore all random number generators after the block: the harness seeds and uses them."""
    python, of_numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def evaluating(engine: Engine) -> Iterator[LanguageModel]:
    """Yield the model without dropout; then restore its mode and the angles of training."""
    module = cast("LanguageModel", engine.module)
    was_training = module.training
    try:
        yield module.eval()
    finally:
        module.train(was_training)
        module.trained_keys = ()
        module.expect_keys(0, 0)
