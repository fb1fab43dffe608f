"""Where this checkout is: tests start in an empty directory, and name its files from here."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
