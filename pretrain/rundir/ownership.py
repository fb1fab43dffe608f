"""Whose a run directory is, and that nothing in it leads out of it. Torch-free."""

from pathlib import Path

from foundation.errors import ConfigError, DataError
from foundation.files import make_directory
from foundation.ownership import is_of_another_user, refuse_foreign, refuse_open_parents
from foundation.paths import url_of
from pretrain.config.run import RunConfig

_NAMES = (
    "attempt", "checkpoints", "config.yaml", "heartbeats", "ledger.jsonl", "logs", "metrics.jsonl",
    "run.json", "slurm", "tensorboard", "traces", "wandb",
)  # fmt: skip
# What a command that starts or ends the run does depends on these.
_TRUSTED = ("ledger.jsonl", "config.yaml", "slurm")


def make_run_directory(run_dir: Path) -> None:
    """Create the directory of a run, which no other user may write whatever the umask."""
    make_directory(run_dir, 0o755)


class ForeignRun(ConfigError):
    """Another user can have written the files that decide what the run does."""


def refuse_foreign_run(run_dir: Path) -> None:
    """Raise ForeignRun unless only this user and root can have written _TRUSTED.

    For commands that start or end a run by its files. Commands that only read it are safe.
    """
    run_dir = run_dir.resolve()
    try:
        refuse_open_parents(run_dir)
        refuse_foreign(run_dir, with_contents=False)
        for name in _TRUSTED:
            refuse_foreign(run_dir / name)
    except DataError as error:
        raise ForeignRun(str(error)) from None


def refuse_foreign_urls(config_file: Path, config: RunConfig) -> None:
    """Raise ConfigError if these are another user's settings and name a server to ask."""
    parts = (part.path for part in config.data.all_parts)
    paths = (config.data.path, *parts, *config.evaluation.sets.values())
    url = next(filter(None, map(url_of, paths)), None)
    if url is not None and is_of_another_user(config_file):
        raise ConfigError(
            f"{config_file} belongs to another user, whose settings may not choose a server; to "
            f"use it nevertheless, give data.path={url}"
        )


def refuse_links(run_dir: Path) -> None:
    """Raise ConfigError if one of the run's own names is a link.

    A run that came from elsewhere could make us overwrite any file of the user.
    """
    for name in _NAMES:
        if (run_dir / name).is_symlink():
            raise ConfigError(
                f"{run_dir / name} is a link, expected a part of the run; move what it leads to "
                "into its place, or remove it"
            )
