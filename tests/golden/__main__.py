"""`python -m tests.golden FILES`: one line per file; fails unless all supported ones agree."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pretrain.terminal.text import text_table
from tests.golden.compare import COLUMNS, LIMIT, compare


def main(files: Sequence[str]) -> int:
    """Print a table; return 0 if every supported case agrees to 1e-10, else 1."""
    results = [compare(Path(file)) for file in files]
    rows = [["case", *COLUMNS, "verdict"]]
    for result in results:
        errors = [result.errors.get(column) for column in COLUMNS]
        cells = ["-" if error is None else f"{error:.1e}" for error in errors]
        rows.append([result.name, *cells, result.verdict])
    print(text_table(rows))
    supported = [result for result in results if not result.note]
    passed = [result for result in supported if result.verdict == "ok"]
    agree = f"{len(passed)} of {len(supported)} supported files agree"
    print(f"\n{agree} to {LIMIT:g} (largest absolute error, float64)")
    return 0 if supported and len(passed) == len(supported) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
