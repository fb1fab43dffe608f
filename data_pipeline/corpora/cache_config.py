"""The settings of a node's cache, apart from what uses it: settings are read where numpy is slow to load."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Where this node keeps shards of corpora that are named by a URL; all its ranks share the directory."""

    directory: Path | None = (
        None  # on a local disk; null: `xl-pretrain-UID` among the temporary files
    )
    gib: float = 20.0  # no more than so much; what was used longest ago makes room

    def __post_init__(self) -> None:
        if self.gib <= 0:
            raise ConfigError(f"data.cache.gib={self.gib:g} must be positive")

    @property
    def place(self) -> Path:
        """The directory, whether it was named or not."""
        if self.directory is not None:
            return self.directory.expanduser()
        return Path(tempfile.gettempdir()) / f"xl-pretrain-{os.getuid()}"
