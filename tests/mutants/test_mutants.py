"""The places that the list names are in the code, and the tests it names exist."""

from tests.mutants.__main__ import ROOT, mutants


def test_every_place_is_in_the_code_once_and_has_tests() -> None:
    for each in mutants():
        assert (ROOT / each.file).read_text().count(each.was) == 1, (each.file, each.was)
        assert each.caught_by, each.breaks
        for path, _, test in (name.partition("::") for name in each.caught_by):
            assert test in (ROOT / path).read_text(), (path, test)
