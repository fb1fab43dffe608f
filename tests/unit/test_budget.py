import pytest

from tests import budget


@pytest.mark.parametrize("name", budget.LIMITS)
def test_packages_that_outgrow_a_number_fail_with_what_was_found(name, capsys, monkeypatch):
    monkeypatch.setattr(budget, "LIMITS", {**budget.LIMITS, name: -1})
    assert budget.main() == 1
    assert f"{name}: found " in capsys.readouterr().out
