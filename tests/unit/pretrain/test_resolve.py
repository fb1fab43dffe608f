"""A run's settings mean the same from every directory."""

from __future__ import annotations

from pathlib import Path

from pretrain.config.resolve import with_absolute_paths
from pretrain.config.run import DataConfig, MixturePart, PhaseConfig, RunConfig


def test_every_path_of_a_run_becomes_absolute(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parts = (MixturePart(path=Path("a")), MixturePart(path=Path("b")))
    later = PhaseConfig(from_step=5, mixture=(MixturePart(path=Path("c")),))
    run = RunConfig(
        initial_weights=Path("w"), data=DataConfig(path=Path("d"), mixture=parts, phases=(later,))
    )
    found = with_absolute_paths(run)
    paths = [found.initial_weights, found.data.path, *(part.path for part in found.data.mixture)]
    paths += [part.path for part in found.data.phases[0].mixture]
    assert paths == [tmp_path / name for name in "wdabc"]
