"""The site: README.md, CONTRIBUTING.md and the pages beside this file, by `make site`."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "xl-pretrain"
html_title = project
html_theme = "furo"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/**.md"]
myst_heading_anchors = 4
pygments_style = "friendly"

# The pages in the order of docs/README.md, whose table names each once or more.
INDEX = Path(__file__).with_name("README.md")


def setup(app: Sphinx) -> None:
    """Give the start page a table of contents, which plain Markdown cannot say."""
    app.connect("source-read", contents)


def contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append a hidden toctree of every page that docs/README.md links to."""
    if page == root_doc:
        pages = re.findall(r"\]\((\w[^)#]*)", INDEX.read_text())
        entries = "\n".join(dict.fromkeys(f"docs/{each}" for each in pages))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n\ndocs/README\n{entries}\nCONTRIBUTING\n```\n"
