"""`pretrain demo`: from text to report on this machine in minutes. Finished stages are kept."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.errors import ConfigError
from data_pipeline.files import write_json, write_text
from data_pipeline.progress import duration
from pretrain.demo.page import render
from pretrain.demo.stages import RANKS, STAGES, Demo, Stage, losses_text, new_demo
from pretrain.reporting.run_history import read_history
from pretrain.rundir.run_dir import RunDir

EXIT_DIFFERENT = 1  # the resumed run is not the uninterrupted one
RESULTS, LOCK = "demo.json", "demo.lock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command line of `pretrain demo`."""
    add = parser.add_argument
    text = "folder with text to train on (default: Python's standard library)"
    add("--corpus", type=Path, metavar="DIR", help=text)
    text = "output directory (default %(default)s)"
    add("--run-dir", type=Path, default=Path("runs/demo"), metavar="DIR", help=text)
    text = "training steps (default: about a minute of training)"
    add("--steps", type=int, default=0, metavar="N", help=text)
    add("--fresh", action="store_true", help="start from scratch, as with other text or steps")


def run(arguments: argparse.Namespace) -> int:
    """Run all stages and write the report; 0 unless the resumed run differs."""
    demo = new_demo(arguments.run_dir, arguments.corpus, arguments.steps)
    refuse_other_directories(demo.directory)
    with RunDir(demo.directory).locked("demo"):
        if arguments.fresh or not read_results(demo):
            start_from_scratch(demo)
        print(f"A Transformer-XL from text to samples on {RANKS} ranks, killed on the way.")
        try:
            run_stages(demo)
        except KeyboardInterrupt:
            print("\nStopped. Finished stages are kept; run the same command to resume.")
            raise
        write_text(demo.directory / "report.html", render(demo))
    return conclude(demo)


def run_stages(demo: Demo, stages: Sequence[Stage] = STAGES) -> None:
    """Run the stages that have no result. One that was stopped starts from scratch."""
    for number, (name, title, stage) in enumerate(stages, start=1):
        print(f"\n{number}/{len(stages)} {title}", flush=True)
        is_kept = name in demo.results
        if not is_kept:
            shutil.rmtree(demo.directory / name, ignore_errors=True)
            start = time.monotonic()
            result = stage(demo)
            demo.results[name] = {**result, "seconds": round(time.monotonic() - start, 1)}
            write_results(demo)
        kept = "  (kept from before)" if is_kept else ""
        print(f"{demo.results[name]['summary']}{kept}", flush=True)


def conclude(demo: Demo) -> int:
    """Print what the demo showed, where the report is and what to do next."""
    seconds = sum(result["seconds"] for result in demo.results.values())
    gain = demo.results["memory"]["gain"]
    resumed = f"all {demo.steps} losses and the final state are equal, bit for bit"
    if demo.problems:
        resumed = "the run DIFFERS from the uninterrupted one; please report this as a bug"
    memory = f"{gain:.2f} nats per token less loss than without it, on text not trained on"
    if gain <= 0:
        memory = f"did not help ({-gain:.2f} nats per token more loss); use more --steps"
    print(f"""
Results (all stages took {duration(seconds)})
  losses at the end   {losses_text(read_history(demo.killed.path))}
  killed and resumed  {resumed}
  memory              {memory}
  report              {demo.directory / "report.html"}
  next                pretrain generate {demo.killed.path} --prompt 'def '
                      tensorboard --logdir {demo.directory}""")
    return EXIT_DIFFERENT if demo.problems else 0


def read_results(demo: Demo) -> bool:
    """Read what is finished into `demo.results`; whether demo.json belongs to these inputs."""
    try:
        tree = json.loads((demo.directory / RESULTS).read_bytes())
        is_same = tree["inputs"] == demo.inputs
        demo.results.update(tree["results"] if is_same else {})
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # new, or corrupted
        return False
    return is_same


def write_results(demo: Demo) -> None:
    """Write demo.json."""
    write_json(demo.directory / RESULTS, {"inputs": demo.inputs, "results": demo.results})


def start_from_scratch(demo: Demo) -> None:
    """Forget the results and remove everything else."""
    write_results(demo)  # first: after a Ctrl-C, nothing that is half removed may count as finished
    for entry in demo.directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name not in (RESULTS, LOCK):
            entry.unlink()


def refuse_other_directories(directory: Path) -> None:
    """Raise ConfigError unless the directory is new, empty or a demo's."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"--run-dir {directory} is a file; give a directory")
    names = {entry.name for entry in directory.iterdir()}
    if names - {LOCK} and RESULTS not in names:
        raise ConfigError(
            f"--run-dir {directory} has other files and no {RESULTS}; use an empty or new directory"
        )
