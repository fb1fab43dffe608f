"""What a run keeps in its directory, and that nothing there leads out of it. Torch-free."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.errors import ConfigError

_NAMES = {
    *("run.json", "config.yaml", "ledger.jsonl", "metrics.jsonl", "matmul_peaks.json", "attempt"),
    *("checkpoints", "heartbeats", "logs", "slurm", "tensorboard", "traces"),
}


def refuse_links(run_dir: Path) -> None:
    """Raise ConfigError if one of the run's own names is a link: a run writes in its directory.

    One that came from elsewhere could make it overwrite any file of the user.
    """
    for name in sorted(_NAMES):
        if (run_dir / name).is_symlink():
            raise ConfigError(
                f"{run_dir / name} is a link, expected a part of the run; move what it leads to "
                "into its place, or remove it"
            )
