"""The stages of the demo. Most run a public command, as a user would.

Each returns a result for RUN/demo.json with a one-line "summary". Later stages and the report read
these results and the run directories, so finished stages need not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from data_pipeline.config_loader import load_config, to_tree
from data_pipeline.corpora.manifest import SPLITS, read_manifest
from data_pipeline.errors import ConfigError, UserError
from data_pipeline.own_programs import own_command
from data_pipeline.yaml_files import SHIPPED
from pretrain.checkpoint.marker import latest_step
from pretrain.commands.verify_resume import train_ranks
from pretrain.config.run import RunConfig
from pretrain.demo import texts
from pretrain.reporting.run_history import History, read_history
from pretrain.rundir.losses import TRAIN_LOSS, VALIDATION_LOSS
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.speeds import RUN_SPEED, SCORED_SPEED
from pretrain.terminal.live_bar import live_bar
from pretrain.terminal.text import counted, number, text_table

CONFIG = SHIPPED / "experiments" / "demo.yaml"
FORMAT = 3  # of demo.json
RANKS = 2
MIN_STEPS = 16
NUM_CHECKPOINTS = 8
NUM_MEASUREMENTS = 32  # of speed; the loss is recorded at every step
# Small shards, so that the lanes' order has something to permute.
BUILD_OPTIONS = (
    *("--validation-fraction", "0.06", "--shard-bytes", "524288"),
    *("tokenizer.kind=bpe", "tokenizer.vocab_size=4096", f"threads={RANKS}"),
)
MEMORY_MULTIPLES = (0, 1, 2, 4)  # of the memory length in training
PROMPT = '"""Read settings from a file."""\n\nimport os\n\n\nclass Settings:\n'
SAMPLING_OPTIONS = ("--tokens", "260", "--temperature", "0.7", "--top-p", "0.9")

Result = dict[str, Any]


@dataclass(frozen=True)
class Demo:
    """A demo's directory, its settings, and the results of the stages finished so far."""

    directory: Path
    corpus: Path | None  # the user's folder; None: the standard library
    run: RunConfig
    overrides: tuple[str, ...]  # of the experiment file, which make it `run`
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def uninterrupted(self) -> RunDir:
        return RunDir(self.directory / "uninterrupted")

    @property
    def killed(self) -> RunDir:
        return RunDir(self.directory / "killed")

    @property
    def steps(self) -> int:
        return self.run.optim.steps

    @property
    def problems(self) -> list[str]:
        """Where the resumed run differs from the uninterrupted one."""
        return self.results["resumed"]["problems"]

    @cached_property
    def inputs(self) -> str:
        """A hash of the text and the settings: with others, no finished stage can be kept."""
        text: Any = sys.version
        if self.corpus is not None:
            files = texts.files_of_folder(self.corpus, self.directory)
            text = [[file.name, file.size, file.modified] for file in files]
        run = to_tree(self.run)
        del run["data"]["path"]  # the directory may be moved
        tree = [FORMAT, text, BUILD_OPTIONS, run, PROMPT, SAMPLING_OPTIONS]
        return hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:16]

    @property
    def kill_step(self) -> int:
        """After half of the steps, midway between two checkpoints: some steps must be repeated."""
        interval = self.run.checkpoint.interval
        return self.steps // 2 // interval * interval + (interval + 1) // 2


def new_demo(directory: Path, corpus: Path | None, steps: int) -> Demo:
    """Return a demo of `steps` steps, or with 0 as many as the experiment file has."""
    if steps and steps < MIN_STEPS:
        raise ConfigError(
            f"--steps {steps} is too short to kill and resume; use {MIN_STEPS} or more"
        )
    if corpus is not None:
        texts.files_of_folder(corpus, directory)  # raises if there are none
    default = load_config(RunConfig, CONFIG).optim
    steps = steps or default.steps
    interval = max(1, steps // NUM_CHECKPOINTS)
    overrides = (
        f"data.path={(directory / 'data').resolve()}",
        f"optim.steps={steps}",
        f"optim.schedule.warmup_steps={min(default.schedule.warmup_steps, steps // 4)}",
        f"checkpoint.interval={interval}",
        f"evaluation.interval={NUM_CHECKPOINTS // 2 * interval}",
        f"metrics.interval={max(1, steps // NUM_MEASUREMENTS)}",
    )
    return Demo(directory, corpus, load_config(RunConfig, CONFIG, overrides), overrides)


def collect_text(demo: Demo) -> Result:
    if demo.corpus is None:
        documents, source = texts.standard_library(), "this Python's standard library"
    else:
        documents = texts.documents_of_folder(demo.corpus, demo.directory)
        source = f"--corpus {demo.corpus}"
    return {"summary": texts.write_jsonl(_documents(demo), documents, source)}


def build_corpus(demo: Demo) -> Result:
    data = demo.directory / "data"
    _call("data-pipeline", "build", "--input", _documents(demo), "--output", data, *BUILD_OPTIONS)
    manifests = {split: read_manifest(data / split) for split in SPLITS}
    parts = [
        f"{split}: {manifest.documents:,} documents, {manifest.tokens / 1e6:.2f}M tokens in "
        f"{counted(len(manifest.shards), 'shard')}"
        for split, manifest in manifests.items()
    ]
    return {"summary": "; ".join(parts)}


def train_uninterrupted(demo: Demo) -> Result:
    _train(demo, demo.uninterrupted)
    return {"summary": _speed(demo.uninterrupted)}


def train_and_kill(demo: Demo) -> Result:
    _train(demo, demo.killed, fault=f"sigkill@{demo.kill_step}")
    checkpoint = latest_step(demo.killed.checkpoints)
    # Resuming cuts these steps from metrics.jsonl. They are kept here to compare both attempts.
    lost = {step: loss for step, loss in losses_of(demo.killed).items() if step > checkpoint}
    return {
        "killed_after": demo.kill_step,
        "checkpoint": checkpoint,
        "lost": list(lost.items()),
        "summary": f"killed after step {demo.kill_step}; the latest checkpoint is of step "
        f"{checkpoint}, so {len(lost)} steps are lost and will be repeated",
    }


def resume_and_compare(demo: Demo) -> Result:
    from pretrain.commands.same_run import differences

    _train(demo, demo.killed, attempt=1)
    problems = differences(demo.uninterrupted, demo.killed, demo.steps)
    repeated, lost = losses_of(demo.killed), demo.results["killed"]["lost"]
    problems += [
        f"step {step}: loss {loss!r} before the kill, {repeated[step]!r} after"
        for step, loss in lost
        if repeated[step] != loss
    ]
    summary = (
        f"identical: every loss and the whole final state (weights, moments, memories, cursors, "
        f"random numbers); {len(lost)} lost steps were repeated"
    )
    if problems:
        summary = "\n".join(["DIFFERENT:", *problems[:20]])
    return {"problems": problems[:20], "summary": summary}


def evaluate_memory(demo: Demo) -> Result:
    lengths = [times * demo.run.model.longest_memory for times in MEMORY_MULTIPLES]
    # As many as in training: a validation loss is the same number wherever it is shown.
    tokens = ("--max-tokens", demo.run.evaluation.max_tokens)
    options = ("--memory-length", *lengths, *tokens, "--json")
    printed = _call("pretrain", "evaluate", demo.killed.path, *options)
    rows = json.loads(printed)["results"]
    print(text_table(memory_table(rows)))
    gain = rows[0]["loss"] - rows[1]["loss"]
    summary = f"memory lowers the validation loss by {gain:.2f} nats per token"
    return {"rows": rows, "gain": gain, "summary": summary}


def memory_table(rows: list[Result]) -> list[tuple[str, ...]]:
    """Return a table of evaluations, heads first."""
    return [
        ("memory", VALIDATION_LOSS, "perplexity", "bits/byte", SCORED_SPEED),
        *(
            (
                f"{row['memory_length']:,}",
                f"{row['loss']:.4f}",
                f"{row['perplexity']:.2f}",
                f"{row['bits_per_byte']:.3f}",
                f"{row['tokens'] / row['seconds']:,.0f}",
            )
            for row in rows
        ),
    ]


def sample(demo: Demo) -> Result:
    prompt = PROMPT if demo.corpus is None else ""
    options = ("--prompt", prompt, *SAMPLING_OPTIONS)
    printed = _call("pretrain", "generate", demo.killed.path, *options)
    text = printed.removeprefix(prompt).removesuffix("\n")
    print(printed)
    return {"prompt": prompt, "text": text, "summary": f"{len(text):,} characters sampled"}


def losses_of(run_dir: RunDir) -> dict[int, float]:
    """Return the training loss of every step on record."""
    lines = run_dir.read_metrics()
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def median_of(history: History, name: str) -> float:
    """Return the median over the run of what each interval measured."""
    return statistics.median(history.series(name)[1])


def _documents(demo: Demo) -> Path:
    return demo.directory / "text" / "documents.jsonl"


def _train(demo: Demo, run_dir: RunDir, fault: str = "", attempt: int = 0) -> None:
    with live_bar():
        train_ranks(
            CONFIG, demo.overrides, run_dir, RANKS, fault=fault, attempt=attempt, is_shown=True
        )


def losses_text(history: History) -> str:
    """Return the run's train and validation loss, as its other reports have them."""
    results = history.results
    train, validation = results.train_loss, results.validation_loss
    return f"{TRAIN_LOSS} {number(train, '.4f')}, {VALIDATION_LOSS} {number(validation, '.4f')}"


def _speed(run_dir: RunDir) -> str:
    history = read_history(run_dir.path)
    mfu, memory = (median_of(history, name) for name in ("mfu", "used_memory_gib"))
    speed = number(history.results.run_tokens_per_second, ",.0f")
    losses = losses_text(history)
    return f"{losses}, {speed} {RUN_SPEED}, MFU {mfu:.0%}, {memory:.2f} GiB per rank"


def _call(program: str, *arguments: object) -> str:
    """Show a command, run it, and return what it prints; UserError if it fails."""
    words = list(map(str, arguments))
    print(f"$ {shlex.join([program, *words])}", flush=True)
    module = program.replace("-", "_")
    done = subprocess.run(
        own_command(module, *words),
        stdout=subprocess.PIPE,
        text=True,
        # More threads wait for each other as soon as the machine has other work.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise UserError(f"'{program} {words[0]}' exited with status {done.returncode}; see above")
    return done.stdout


# Name, title and function. The name is also that of the directory it fills, if it fills one.
Stage = tuple[str, str, Callable[[Demo], Result]]
STAGES: tuple[Stage, ...] = (
    ("text", "Collect text", collect_text),
    ("data", "Train a tokenizer and write shards", build_corpus),
    ("uninterrupted", f"Train on {RANKS} ranks with DeepSpeed", train_uninterrupted),
    ("killed", "Train again and SIGKILL all ranks midway", train_and_kill),
    ("resumed", "Resume from the latest checkpoint and compare every bit", resume_and_compare),
    ("memory", "Evaluate with memories of several lengths", evaluate_memory),
    ("sample", "Sample text", sample),
)
