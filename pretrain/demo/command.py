"""`pretrain demo`: the whole story on this machine in minutes, in stages that are kept once they are finished."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from pretrain.demo.journal import Journal, key_of
from pretrain.demo.screen import Screen
from pretrain.demo.settings import RANKS, Settings, make_settings
from pretrain.demo.stages import Result, Results, Stage, remove
from pretrain.demo.story import memory_gain, story
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.text import duration

EXIT_NOT_SHOWN = 1  # a claim of the demo did not hold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain demo`."""
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="a folder of your own text (default: Python's own)",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="where all goes (default %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="length of the training (default: about a minute)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew instead of keeping what is finished"
    )


def run(arguments: argparse.Namespace) -> int:
    """Tell the story; 0 if everything it claims was shown."""
    settings = make_settings(arguments.run_dir, arguments.corpus, arguments.steps)
    screen = Screen(len(story()))
    with RunDir(settings.directory).locked("demo"):
        journal = Journal.open(settings.directory, arguments.fresh)
        screen.title(
            "A Transformer-XL from text to sample, killed on the way",
            f"{RANKS} ranks on this machine; stop with Ctrl-C whenever you like, the same command goes on",
        )
        try:
            results = tell(screen, journal, settings)
        except KeyboardInterrupt:
            screen.say("\nstopped; finished stages are kept, the same command goes on from here")
            raise
    return conclude(screen, settings, journal, results)


def tell(screen: Screen, journal: Journal, settings: Settings) -> Results:
    """The results of all stages, those kept from before included."""
    results: Results = {}
    key = ""
    for number, stage in enumerate(story(), start=1):
        screen.stage(number, stage.title)
        key = key_of(key, {stage.name: stage.inputs(settings)})
        kept = None if stage.is_always_done else journal.finished(stage.name, key)
        if kept is None:
            results[stage.name] = _do(screen, journal, stage, key, settings, results)
            screen.say(stage.summary(results[stage.name]))
        else:
            results[stage.name] = kept
            screen.kept(stage.summary(kept))
    return results


def conclude(screen: Screen, settings: Settings, journal: Journal, results: Results) -> int:
    """Say what was shown, where the report lies and what to do next."""
    problems, gain = results["resume"]["problems"], memory_gain(results["memory"])
    screen.title("What you have seen", f"all stages together {duration(journal.seconds())}")
    if problems:
        screen.bad(
            "the killed and resumed run differs from the undisturbed one: please report this as a bug"
        )
    else:
        screen.good(
            f"killed by SIGKILL and resumed: all {settings.steps} losses and the final state equal, bit for bit"
        )
    if gain > 0:
        screen.good(
            f"memory helps: {gain:.2f} nats per token less loss than without it, on text the model never saw"
        )
    else:
        screen.bad(
            f"memory did not help ({-gain:.2f} nats per token more loss than without it): use more --steps"
        )
    screen.say(
        f"\nreport   {settings.report}\nnext     pretrain generate {settings.killed.path} --prompt 'def '"
    )
    screen.say(f"         tensorboard --logdir {settings.directory}")
    return EXIT_NOT_SHOWN if problems else 0


def _do(
    screen: Screen, journal: Journal, stage: Stage, key: str, settings: Settings, results: Results
) -> Result:
    goes_on = journal.begin(stage.name, key)
    if not (goes_on and stage.can_go_on):
        remove(stage.leaves(settings))
    begin = time.monotonic()
    result = stage.run(screen, settings, results)
    journal.finish(stage.name, result, time.monotonic() - begin)
    return result
