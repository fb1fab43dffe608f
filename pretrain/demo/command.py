"""`pretrain demo`: from text to report on this machine in minutes, by commands that users have.

A demo that was stopped resumes: a corpus, and the run that is killed, as they always do; the
uninterrupted run starts from scratch.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from foundation.errors import ConfigError, UserError
from foundation.files import read_json, write_json
from foundation.own_programs import own_command
from foundation.settings import load_config
from foundation.yaml_files import SHIPPED
from pretrain.checkpoint.marker import latest_step
from pretrain.commands.output_paths import check_output_directory
from pretrain.commands.verify_resume import train_ranks
from pretrain.config.run import RunConfig
from pretrain.demo.texts import MAX_CHARACTERS, MIN_BYTES, standard_library, write_jsonl
from pretrain.reporting.run_history import read_history
from pretrain.rundir.metric_names import STEP_LOSS, TRAIN_LOSS, VALIDATION_LOSS
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.live_bar import live_bar
from pretrain.terminal.text import number, text_table

EXIT_DIFFERENT = 1  # the resumed run is not the uninterrupted one
CONFIG = SHIPPED / "experiments" / "demo.yaml"
RANKS, MIN_STEPS, NUM_CHECKPOINTS, NUM_MEASUREMENTS = 2, 16, 8, 32
# Small shards, so that the lanes' order has something to permute.
BUILD_OPTIONS = (
    *("--validation-fraction", "0.06", "--shard-bytes", "524288"),
    *("tokenizer.kind=bpe", "tokenizer.vocab_size=4096", f"threads={RANKS}"),
    f"split_characters={MAX_CHARACTERS}",
)
TEXT, BEFORE_KILL = "text.jsonl", "before-the-kill.json"
OWN = {TEXT, BEFORE_KILL, "data", "uninterrupted", "killed", "report.html", "report.png"}
PROMPT = '"""Read settings from a file."""\n\nimport os\n\n\nclass Settings:\n'
SAMPLING_OPTIONS = ("--tokens", "260", "--temperature", "0.7", "--top-p", "0.9")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command line of `pretrain demo`."""
    add = parser.add_argument
    text = "folder with 2 MB of text or more to train on (default: Python's standard library)"
    add("--corpus", type=Path, metavar="DIR", help=text)
    text = "output directory (default %(default)s)"
    add("--run-dir", type=Path, default=Path("runs/demo"), metavar="DIR", help=text)
    text = "training steps (default: about a minute of training)"
    add("--steps", type=int, default=0, metavar="N", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 unless the resumed run differs from the uninterrupted one."""
    directory, corpus = arguments.run_dir, arguments.corpus
    if corpus and corpus.resolve() in (directory.resolve(), *directory.resolve().parents):
        raise ConfigError(f"--run-dir {directory} is in --corpus {corpus}; put it elsewhere")
    size = sum(path.stat().st_size for path in corpus.rglob("*")) if corpus else MIN_BYTES
    if size < MIN_BYTES:
        needed = f"a folder with {MIN_BYTES / 1e6:.0f} MB of text or more"
        raise ConfigError(f"--corpus {corpus} has {size / 1e6:.2f} MB, expected {needed}")
    check_output_directory("--run-dir", directory)
    if directory.exists() and (others := {entry.name for entry in directory.iterdir()} - OWN):
        raise ConfigError(f"--run-dir {directory} has other files ({min(others)}); use a new one")
    demo = Demo(directory, arguments.steps)
    print(f"A Transformer-XL from text to samples on {RANKS} ranks, killed on the way.")
    try:
        return demo.show(corpus)
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept; run the same command to resume.")
        raise


class Demo:
    """Two runs with the same settings, one of which is killed."""

    def __init__(self, directory: Path, steps: int = 0) -> None:
        """`steps` to train; 0: those of the experiment file."""
        if steps and steps < MIN_STEPS:
            raise ConfigError(
                f"--steps {steps} is too short to kill and resume; use {MIN_STEPS} or more"
            )
        default = load_config(RunConfig, CONFIG).optim
        steps = steps or default.steps
        interval = max(1, steps // NUM_CHECKPOINTS)
        self.overrides = (
            f"data.path={(directory / 'data').resolve()}",
            f"optim.steps={steps}",
            f"optim.schedule.warmup_steps={min(default.schedule.warmup_steps, steps // 4)}",
            f"checkpoint.interval={interval}",
            f"evaluation.interval={NUM_CHECKPOINTS // 2 * interval}",
            f"metrics.interval={max(1, steps // NUM_MEASUREMENTS)}",
        )
        self.config = load_config(RunConfig, CONFIG, self.overrides)
        # After half of the steps, midway between two checkpoints: some steps must be repeated.
        self.kill_step = steps // 2 // interval * interval + (interval + 1) // 2
        self.directory, self.steps = directory, steps
        self.uninterrupted = RunDir(directory / "uninterrupted")
        self.killed = RunDir(directory / "killed")
        for run_dir in (self.uninterrupted, self.killed):
            if run_dir.exists() and (others := run_dir.config.optim.steps) != steps:
                raise ConfigError(
                    f"{run_dir.path} has {others} steps, expected {steps}; use another --run-dir"
                )

    def show(self, corpus: Path | None) -> int:
        """Tell the whole story."""
        _title(1, "Train a tokenizer and write shards")
        if corpus is None:
            corpus = self.directory / TEXT
            if not corpus.exists():
                print(write_jsonl(corpus, standard_library()))
        data = self.directory / "data"
        built = ("build", "--input", corpus, "--output", data, *BUILD_OPTIONS)
        print(_call("data-pipeline", *built), end="")

        _title(2, f"Train on {RANKS} ranks with DeepSpeed")
        if latest_step(self.uninterrupted.checkpoints) < self.steps:
            shutil.rmtree(self.uninterrupted.path, ignore_errors=True)
            self._train(self.uninterrupted)
        print(_losses_text(self.uninterrupted))

        _title(3, "Train again and SIGKILL all ranks midway")
        record = self.directory / BEFORE_KILL
        if not record.exists():
            self._train(self.killed, fault=f"sigkill@{self.kill_step}")
            # Resuming cuts repeated steps from metrics.jsonl. They are kept to compare them.
            kept = [latest_step(self.killed.checkpoints), _losses_of(self.killed)]
            write_json(record, kept)
        checkpoint, losses = read_json(record)
        before = {int(step): loss for step, loss in losses.items()}
        print(
            f"killed after step {self.kill_step}; the latest checkpoint is of step {checkpoint}, "
            f"so {self.kill_step - checkpoint} steps are lost and will be repeated"
        )

        _title(4, "Resume from the latest checkpoint and compare every bit")
        if latest_step(self.killed.checkpoints) < self.steps:
            self._train(self.killed, attempt=1)
        problems = self._compare(checkpoint, before)

        _title(5, "Evaluate with memories of several lengths")
        lengths = [times * self.config.model.longest_memory for times in (0, 1, 2, 4)]
        # As many tokens as in training: a validation loss is the same number wherever it is shown.
        options = ("--max-tokens", self.config.evaluation.max_tokens, "--json", "--memory-length")
        printed = _call("pretrain", "evaluate", self.killed.path, *options, *lengths)
        gain = _show_memory(json.loads(printed)["results"])

        _title(6, "Sample text")
        prompt = PROMPT if corpus.name == TEXT else ""
        options = ("--prompt", prompt, *SAMPLING_OPTIONS)
        print(_call("pretrain", "generate", self.killed.path, *options))

        _title(7, "Write the report")
        print(_call("pretrain", "report", self.killed.path, "--output", self.directory))
        self._conclude(problems, gain)
        return EXIT_DIFFERENT if problems else 0

    def _train(self, run_dir: RunDir, fault: str = "", attempt: int = 0) -> None:
        with live_bar():
            train_ranks(
                CONFIG, self.overrides, run_dir, RANKS, fault=fault, attempt=attempt, is_shown=True
            )

    def _compare(self, checkpoint: int, before: dict[int, float]) -> list[str]:
        """Return how the runs differ; print losses around the checkpoint and around the kill."""
        from pretrain.commands.same_run import differences

        losses, after = _losses_of(self.uninterrupted), _losses_of(self.killed)
        problems = differences(self.uninterrupted, self.killed, self.steps)
        problems += [f"step {step}: another loss" for step in before if before[step] != after[step]]
        heads = ("step", STEP_LOSS, "uninterrupted", "before the kill", "after resuming")
        rows: list[tuple[str, ...]] = [heads]
        for step in sorted({checkpoint, checkpoint + 1, self.kill_step, self.kill_step + 1}):
            # Up to the checkpoint the resumed run's record was measured before the kill.
            found = (losses[step], before.get(step), after[step] if step > checkpoint else None)
            bits = ["" if loss is None else loss.hex() for loss in found]
            rows.append((str(step), f"{losses[step]:.6f}", *bits))
        print(text_table(rows))
        identical = (
            "identical: every loss and the whole final state (weights, moments, memories, cursors, "
            f"random numbers); {self.kill_step - checkpoint} lost steps were repeated"
        )
        print("\n".join(["DIFFERENT:", *problems[:20]]) if problems else identical)
        return problems

    def _conclude(self, problems: list[str], gain: float) -> None:
        """Print what the demo showed, where the report is and what to do next."""
        resumed = f"all {self.steps} losses and the final state are equal, bit for bit"
        if problems:
            resumed = "the run DIFFERS from the uninterrupted one; please report this as a bug"
        memory = f"{gain:.2f} nats per token less loss than without it, on text not trained on"
        if gain <= 0:
            memory = f"did not help ({-gain:.2f} nats per token more loss); use more --steps"
        print(f"""
Results
  losses at the end   {_losses_text(self.killed)}
  killed and resumed  {resumed}
  memory              {memory}
  report              {self.directory / "report.html"}
  next                pretrain generate {self.killed.path} --prompt 'def '
                      tensorboard --logdir {self.directory}""")


def _title(number: int, title: str) -> None:
    print(f"\n{number}/7 {title}", flush=True)


def _show_memory(rows: list[dict[str, float]]) -> float:
    """Print evaluations; return how much less the loss is with the memory of training."""
    heads = ("memory", VALIDATION_LOSS, "perplexity", "bits/byte")
    names = ("memory_length", "loss", "perplexity", "bits_per_byte")
    formats = (",", ".4f", ".2f", ".3f")
    cells = [
        [format(row[name], how) for name, how in zip(names, formats, strict=True)] for row in rows
    ]
    print(text_table([heads, *cells]))
    return rows[0]["loss"] - rows[1]["loss"]


def _losses_of(run_dir: RunDir) -> dict[int, float]:
    """Return the training loss of every step on record."""
    lines = run_dir.read_metrics()
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def _losses_text(run_dir: RunDir) -> str:
    found = read_history(run_dir.path).results
    train, validation = number(found.train_loss, ".4f"), number(found.validation_loss, ".4f")
    return f"{TRAIN_LOSS} {train}, {VALIDATION_LOSS} {validation}"


def _call(program: str, *arguments: object) -> str:
    """Show a command, run it, and return what it prints; UserError if it fails."""
    words = list(map(str, arguments))
    print(f"$ {shlex.join([program, *words])}", flush=True)
    # More threads wait for each other as soon as the machine has other work.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = own_command(program.replace("-", "_"), *words)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise UserError(f"'{program} {words[0]}' exited with status {done.returncode}; see above")
    return done.stdout
