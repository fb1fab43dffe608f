"""Writes docs/settings.md from the settings' dataclasses: `python -m docs.settings_page`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.config import CorpusConfig
from foundation.cli import ResumeRule, default_of, kind_of, no_resume
from foundation.settings import Setting, settings_of
from pretrain.commands.settings import resume_rule
from pretrain.config.cluster import ClusterConfig
from pretrain.config.run import RunConfig

PATH = Path(__file__).with_name("settings.md")
INTRODUCTION = """\
# Settings

Every setting of the three kinds of files, written by `python -m docs.settings_page` from the
classes that check them. The same text is printed by `pretrain settings [PREFIX]`, `data-pipeline
settings [PREFIX]` and `launcher settings [PREFIX]`; PREFIX is a setting, a section, a part of a
name or of an explanation: `pretrain settings rate`.

* A file has `name: value` lines, in sections: `optim: {steps: 400}`. The command line takes the
  same as `optim.steps=400`. `extends: other.yaml` takes over another file's settings.
* A number with a unit may be written `4k` or `4K`, `10M`, `1.5B` or `1.5G`, `2T`
  (powers of 1,000), or `4Ki`, `8Mi`, `1Gi` (powers of 1,024). Where the unit is bytes, B stands
  for bytes: `2GB`, `2GiB`.
  Flags that take a number of tokens, parameters or bytes accept the same.
* A name that is unknown here is an error that suggests the closest setting.
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


def as_markdown(schema: Any, rule: ResumeRule) -> Iterator[str]:
    """Yield a table of the schema's own settings, then one of each of its sections."""
    settings = list(settings_of(schema))
    yield from _table(schema, _inside("", settings), rule)
    shown: dict[type, str] = {}
    for section in settings:
        if section.section:
            mark = "[]" if section.hint is not section.section else ""
            name = f"{section.name}{mark}"
            yield from ("", f"### {section.name}", "", section.meaning, "")
            if section.section in shown:
                yield f"The settings are those of `{shown[section.section]}`, above."
            else:
                yield from _table(section.section, _inside(name, settings), rule)
            shown.setdefault(section.section, section.name)


def _inside(section: str, settings: Sequence[Setting]) -> list[Setting]:
    return [each for each in settings if each.name.rpartition(".")[0] == section]


def _table(owner: type, settings: Sequence[Setting], rule: ResumeRule) -> Iterator[str]:
    source = inspect.getmodule(owner)
    assert source is not None
    yield f"Defined in `{source.__name__.replace('.', '/')}.py`."
    yield from ("", "| setting | default | value | meaning |", "|---|---|---|---|")
    for each in settings:
        if each.section is None:
            value = "; ".join(filter(None, (kind_of(each), rule(each.name))))
            meaning = each.meaning.replace("|", "\\|")
            yield f"| `{each.name}` | `{default_of(each)}` | {value} | {meaning} |"


if __name__ == "__main__":
    PATH.write_text(page())
