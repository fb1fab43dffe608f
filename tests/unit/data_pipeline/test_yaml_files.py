from __future__ import annotations

import pytest

from foundation.yaml_files import _load


@pytest.mark.parametrize(
    "text", ["- " * 400_000 + "a\n", "\n".join(" " * depth + "a:" for depth in range(600)) + "\n"]
)
def test_no_nesting_exhausts_the_stack(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        _load(text)
