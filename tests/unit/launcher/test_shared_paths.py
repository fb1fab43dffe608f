from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from data_pipeline.config import MixturePart
from launcher.slurm.job_checks import missing_notes
from pretrain.config.data import DataConfig
from pretrain.config.run import RunConfig


def test_corpora_that_are_not_on_this_host_are_warned_of_and_urls_are_not(tmp_path):
    def finished(directory: Path) -> Path:
        directory.mkdir(parents=True)
        (directory / "manifest.json").touch()
        return directory

    run = RunConfig(data=DataConfig(path=tmp_path / "books"))
    (warning,) = missing_notes(run)
    assert warning.startswith(
        f"warning: data.path: found no finished corpus at {tmp_path}/books on this host; "
    )
    finished(tmp_path / "books" / "train")
    assert missing_notes(run) == []
    paths = (tmp_path / "books", Path("s3://bucket/web"))
    parts = tuple(MixturePart(path=path, weight=1.0) for path in paths)
    mixed = replace(run, data=replace(run.data, mixture=parts))
    assert len(missing_notes(mixed)) == 1, "the validation split is of data.path"
    finished(tmp_path / "books" / "validation")
    assert missing_notes(mixed) == []
    sets = {"books": tmp_path / "books", "code": tmp_path / "code"}
    evaluated = replace(run, evaluation=replace(run.evaluation, sets=sets))
    (warning,) = missing_notes(evaluated)
    assert (
        f"evaluation.sets.code: found no finished split of a corpus at {tmp_path}/code" in warning
    )
