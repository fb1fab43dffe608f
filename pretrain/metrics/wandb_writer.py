"""A copy of a run's measurements on Weights & Biases, logged by rank 0.

The library hands lines to a process of its own, which uploads them and keeps them in RUN/wandb.
If the library raises an error, the copy ends and the run continues.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.ownership import refuse_foreign
from foundation.typed_values import to_tree
from pretrain.rundir.metric_names import dashboard_values
from pretrain.rundir.run_dir import RunDir

Copy = Callable[[Sequence[Mapping[str, Any]]], None]
# Settings that send only the run's settings and measurements: no console, code, host or packages.
QUIET = {
    "console": "off",
    "silent": True,
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "host": "-",
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,
    "init_timeout": float(os.environ.get("WANDB_INIT_TIMEOUT") or 60),
    # Seconds for the last upload, because a preempted job has little time. The rest is on disk.
    "finish_timeout": 20.0,
}

logger = logging.getLogger(__name__)


def check_wandb(project: str) -> None:
    """Raise ConfigError if the run asks for W&B and the library is not installed."""
    if project and find_spec("wandb") is None:
        raise ConfigError(
            "metrics.wandb_project needs wandb; `pip install 'xl-pretrain[wandb]'`, or leave it out"
        )


@contextlib.contextmanager
def wandb_copy(run_dir: RunDir, project: str) -> Iterator[Copy]:
    """Yield a function that takes lines of metrics.jsonl; without a project it does nothing.

    The library numbers rows, since steps repeat after a crash or a rewind; charts are drawn over
    the metric `step`.
    """
    session: Any = None
    exit_code = 1

    @contextlib.contextmanager
    def outliving() -> Iterator[None]:
        nonlocal session
        try:
            yield
        except Exception as error:  # training continues without the copy
            logger.warning("Weights & Biases gets no more of this attempt: %s", _reason(error))
            session = None

    def copy(lines: Sequence[Mapping[str, Any]]) -> None:
        if session is None:
            return
        with outliving():
            for line in lines:
                session.log({"step": line["step"], **dashboard_values(line)})

    with outliving():
        session = _start(run_dir, project) if project else None
    try:
        yield copy
        exit_code = 0
    finally:
        with outliving():
            if session is not None:
                session.finish(exit_code=exit_code)


def _start(run_dir: RunDir, project: str) -> Any:
    """Start the session; only on disk if that fails with a server."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no reports of the library's crashes
    import wandb

    config = run_dir.config
    known = {name: value for name, value in QUIET.items() if name in wandb.Settings.model_fields}

    def start(mode: Any = None) -> Any:
        return wandb.init(
            project=project,
            id=run_dir.identity.id,
            name=config.name,
            config=to_tree(config),
            dir=str(run_dir.path.resolve()),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(**known),
        )

    for name in ("wandb", ".wandb"):  # the library reads these settings in the working directory
        refuse_foreign(Path(name, "settings").absolute())
    try:
        session = start()
    except (wandb.Error, OSError) as error:
        wandb.teardown()  # the library's process would not take the same id again
        session = start("offline")
        logger.warning(
            "Weights & Biases: %s; this attempt is kept in %s; upload it with `wandb sync`",
            _reason(error), run_dir.wandb,
        )  # fmt: skip
    session.define_metric("step", hidden=True)
    session.define_metric("*", step_metric="step")
    return session


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
