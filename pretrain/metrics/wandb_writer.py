"""Starts and ends the process that copies a run's metrics to Weights & Biases. Torch-free."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

from data_pipeline.errors import ConfigError, os_error_text
from data_pipeline.own_programs import own_command
from pretrain.config.run import WandbConfig
from pretrain.metrics.wandb_process import END
from pretrain.rundir.run_dir import RunDir

# How long the end of an attempt waits for the last upload. A preempted job has little time left,
# and by then its checkpoint is saved.
END_SECONDS = 20.0

logger = logging.getLogger(__name__)


def check_wandb(config: WandbConfig) -> None:
    """Raise ConfigError if the run asks for W&B and the library is not installed."""
    if config.project and find_spec("wandb") is None:
        raise ConfigError(
            "metrics.wandb.project needs wandb; `pip install 'xl-pretrain[wandb]'`, or leave it out"
        )


@contextlib.contextmanager
def wandb_writer(run_dir: RunDir, config: WandbConfig) -> Iterator[None]:
    """Copy metrics.jsonl to W&B during the block, if the run asks for that.

    Nothing in the block waits for it. If this process is killed, the copying one still sends what
    is on disk and ends.
    """
    if not config.project:
        yield
        return
    try:
        process = subprocess.Popen(
            own_command("pretrain.metrics.wandb_process", str(run_dir.path.resolve())),
            cwd="/",  # the library obeys ./wandb/settings, which may be another user's
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C and the end of the ranks' group leave it time
        )
    except OSError as error:  # no more processes, or no memory for one
        logger.warning("Weights & Biases gets nothing of this attempt: %s", os_error_text(error))
        yield
        return
    assert process.stdin is not None
    with process.stdin as pipe:
        yield
        with contextlib.suppress(BrokenPipeError):
            pipe.write(END)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning(
            "Weights & Biases has not taken everything within %.0f s; what it lacks is in %s",
            END_SECONDS, run_dir.wandb,
        )  # fmt: skip
