"""Writes docs/settings.md from the settings' dataclasses: `python -m tests.settings_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.config import CorpusConfig
from data_pipeline.setting_pages import as_markdown, no_resume
from pretrain.commands.settings import resume_rule
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import ClusterConfig

PATH = Path(__file__).parents[1] / "docs" / "settings.md"
INTRODUCTION = """\
# Settings

Every setting of the three kinds of files, written by `python -m tests.settings_page` from the
classes that check them. The same text is printed by `pretrain settings [PREFIX]`, `data-pipeline
settings [PREFIX]` and `launcher settings [PREFIX]`; PREFIX is a setting, a section, or what another
system calls it: `pretrain settings lr`.

* A file has `name: value` lines, in sections: `optim: {steps: 400}`. The command line takes the
  same as `optim.steps=400`. `extends: other.yaml` takes over another file's settings.
* A number with a unit may be written `4k` or `4K`, `10M`, `1.5B` or `1.5G`, `2T`
  (powers of 1,000), or `4Ki`, `8Mi`, `1Gi` (powers of 1,024). Where the unit is bytes, B stands
  for bytes: `2GB`, `2GiB`.
  Flags that take a number of tokens, parameters or bytes accept the same.
* A name that is unknown here is an error that suggests the setting meant. "Elsewhere" lists names
  of the paper's code and of other systems that are recognized in it.
* A setting that is fixed for a run must be the same when the run is resumed.
"""
KINDS = (
    ("Experiments", "For `pretrain` and `launcher`: configs/experiments.", RunConfig, resume_rule),
    ("Corpora", "For `data-pipeline build`: configs/data.", CorpusConfig, no_resume),
    ("Clusters", "For `launcher --cluster`: configs/clusters.", ClusterConfig, no_resume),
)


def page() -> str:
    """Return the text of docs/settings.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION.rstrip()
    for title, purpose, schema, rule in KINDS:
        yield from ("", f"## {title}", "", purpose, "")
        yield from as_markdown(schema, rule)


if __name__ == "__main__":
    PATH.write_text(page())
