"""Tables as CSV files."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.files import YAML_SUFFIXES, make_directory, write_text


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file, whole or not at all: a row per mapping, with '' for columns that it lacks."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    make_directory(path.parent)
    write_text(path, text.getvalue())


def check_table_path(path: Path) -> None:
    """Raise ConfigError for the name of a YAML or JSON file, such as an experiment's."""
    if path.suffix in (*YAML_SUFFIXES, ".json"):
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"{path} has the name of a {kind} file; name the table {path.stem}.csv")


def read_csv(text: str, separator: str = ",") -> list[dict[str | None, Any]]:
    """Return a mapping per line after the header; csv.Error if the text is not CSV.

    A line's cells beyond the header's are under None.
    """
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator))


def latex_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a LaTeX tabular (package booktabs) of the cells; the first row has the heads."""
    names = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    names |= {mark: f"\\{mark}" for mark in "&%$#_{}"}
    heads, *lines = [
        " & ".join("".join(names.get(mark, mark) for mark in cell) for cell in row) + r" \\"
        for row in rows
    ]
    lines = [re.sub(r"(?<![^ \[])-(?=\d)", "$-$", line) for line in lines]
    columns = "l" + "r" * (len(rows[0]) - 1)
    inside = [r"\toprule", heads, r"\midrule", *lines, r"\bottomrule"]
    needed = r"% needs \usepackage{booktabs}"
    return "\n".join([needed, rf"\begin{{tabular}}{{{columns}}}", *inside, r"\end{tabular}", ""])
