"""Tables as CSV files."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import ConfigError
from foundation.files import YAML_SUFFIXES, make_directory, write_text


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a row per mapping, whole or not at all; values that it does not have are empty."""
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
        raise ConfigError(f"{path} has the name of a {kind} file, expected a table's, x.csv")


def read_csv(text: str, separator: str = ",") -> list[dict[str | None, Any]]:
    """Return a row per line; csv.Error for another text.

    The cells that the header does not name are under None.
    """
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator))


def latex_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a tabular of texts, heads first, for LaTeX with booktabs."""
    names = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    names |= {mark: f"\\{mark}" for mark in "&%$#_{}"}
    heads, *lines = [
        " & ".join("".join(names.get(mark, mark) for mark in cell) for cell in row) + r" \\"
        for row in rows
    ]
    columns = "l" + "r" * (len(rows[0]) - 1)
    inside = [r"\toprule", heads, r"\midrule", *lines, r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", *inside, r"\end{tabular}", ""])
