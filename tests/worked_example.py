"""Writes what `make scaling-demo` found into a page: `python -m tests.worked_example`.

A block of docs/scaling-example.md is between `<!-- scaling-demo: NAME -->` and `<!-- end -->`.
"""

import io
import re
import shutil
import textwrap
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

from pretrain.cli import main as pretrain

DOCS = Path(__file__).parents[1] / "docs"
DEMO = Path("runs/scaling-demo")
CHARTS = ("isoflop", "frontier", "sizes")
WIDTH = 96
BLOCK = re.compile(r"(<!-- scaling-demo: (\w+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def blocks_of(demo: Path) -> dict[str, str]:
    """What the demo in this folder found, by the names of the page's blocks."""
    runs = demo / "runs.csv"
    cells = printed("collect", demo / "sweep.yaml", "--runs-dir", demo)
    found = {
        "rate": printed("report", demo / "tune" / "runs.csv").partition("report: ")[0],
        "runs": cells.partition(f"{runs}: ")[0],
        "fit": printed("fit", runs),
        "grade": printed("grade", demo / "card.yaml", demo / "best"),
    }
    return {name: indented(text) for name, text in found.items()}


def printed(*words: object) -> str:
    """What `pretrain scale` prints about the demo's runs."""
    with redirect_stdout(io.StringIO()) as output:
        assert pretrain(["scale", *map(str, words)]) in (0, 1)  # 1: a forecast that is outside
    return output.getvalue()


def indented(text: str) -> str:
    """The text as a block of code; sentences are wrapped, tables are not."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        is_sentence = len(line) > WIDTH and "  " not in line.strip()
        lines += textwrap.wrap(line, WIDTH, subsequent_indent="  ") if is_sentence else [line]
    return "".join(f"    {line}".rstrip() + "\n" for line in lines)


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """The page with these blocks; KeyError for one that the demo does not fill."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found[2]]}\n{found[4]}", page)


if __name__ == "__main__":
    PAGE = DOCS / "scaling-example.md"
    PAGE.write_text(filled(PAGE.read_text(), blocks_of(DEMO)))
    for chart in CHARTS:
        shutil.copy(DEMO / "report" / f"{chart}.png", DOCS / "images" / f"scaling-{chart}.png")
