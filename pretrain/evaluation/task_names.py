"""Checks of lm-eval's tasks that need no import of lm-eval, which is slow and an extra."""

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from foundation.errors import ConfigError
from foundation.files import YAML_SUFFIXES


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise ConfigError if lm-eval or a task's file is missing; silence the libraries.

    Call it before `pretrain.evaluation.harness` is imported: tqdm reads its variable then.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("tasks need lm-eval; `pip install 'xl-pretrain[lm-eval]'`")
    for task in tasks:
        if task.endswith(YAML_SUFFIXES) and not Path(task).is_file():
            raise ConfigError(f"{task} is not a file; give the YAML file or the name of a task")
    for name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each metric's defaults
