"""The site: README.md, two pages beside it and the pages beside this file, by `make site`."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "xl-pretrain"
html_title = project
html_theme = "furo"
html_static_path = html_css_files = ["site.css"]
smartquotes = False  # they make a dash of the two before a flag
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md"]
myst_heading_anchors = 4
highlight_language = "none"  # commands, settings and drawings, but for fences that say so
pygments_style = "friendly"

# The pages in the groups and the order of docs/README.md, which names each once or more.
INDEX = Path(__file__).with_name("README.md")


def setup(app: Sphinx) -> None:
    """Give links their pages' titles, and the start page a table of contents."""
    app.connect("source-read", titles)
    app.connect("source-read", contents)


def titles(app: Sphinx, page: str, source: list[str]) -> None:
    """Leave the text of links that are called as their file to MyST, which takes the title."""
    source[0] = re.sub(r"\[[\w-]+\.md\]\(", "[](", source[0])


def contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append hidden toctrees, one for each section of docs/README.md, of the pages it links to."""
    if page != root_doc:
        return
    parts = [tree("Documentation", ["docs/README"])]
    for section in INDEX.read_text().split("\n## ")[1:]:
        title, _, table = section.partition("\n")
        pages = dict.fromkeys(f"docs/{name}" for name in re.findall(r"\]\((\w[^)#]*)", table))
        more = ["CONTRIBUTING", "CHANGELOG"] if title == "Reference" else []
        parts.append(tree(title, [*pages, *more]))
    source[0] += "".join(parts)


def tree(caption: str, pages: list[str]) -> str:
    """Return a hidden toctree in MyST's Markdown."""
    entries = "\n".join(pages)
    return f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"
