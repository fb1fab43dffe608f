"""Kills at random moments."""

import pytest

from tests.helpers import chaos


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_bitwise_as_the_unkilled(tiny_corpus, tmp_path, capsys):
    options = ["--kills=4", "--seed=4", f"--corpus={tiny_corpus}", f"--work-dir={tmp_path}"]
    assert chaos.run(options) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "4 kills" in said
    for trouble in ("disk full", "unwritable", "suspended"):
        assert f": {trouble} for" in said
    assert "identical: 120 losses" in said
