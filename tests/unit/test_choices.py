"""A value that is added to a choice, a setting of several names, is handled everywhere or noticed.

pyright rejects a `match` that misses a value. So every decision about a choice must be a `match`
that ends in `assert_never`, or a complete table: then none can be forgotten.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.config import CorpusConfig
from foundation.settings import assert_never
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import ClusterConfig
from pretrain.costs.devices import DEVICES
from tests.helpers.choices import choices_of

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path
    for package in ("foundation", "data_pipeline", "pretrain", "launcher", "benchmarks")
    for path in (ROOT / package).rglob("*.py")
)


CHOICES = {
    name: frozenset(values)
    for root in (RunConfig, CorpusConfig, ClusterConfig)
    for name, values in choices_of(root)
}
VALUES = frozenset().union(*CHOICES.values())


def texts_in(node: ast.expr) -> set[str]:
    """The values of choices in a constant, or in a tuple, list or set of constants."""
    inner = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {
        one.value
        for one in inner
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value in VALUES
    }


def values_in(pattern: ast.pattern) -> set[str]:
    inner = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    return {
        text for one in inner if isinstance(one, ast.MatchValue) for text in texts_in(one.value)
    }


def ends_in_assert_never(node: ast.Match) -> bool:
    last = ast.unparse(node.cases[-1])
    return last.startswith("case _:\n") and last.split("\n")[-1].strip().startswith("assert_never(")


def half_decisions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that decide about some values of a choice and forget those that are added later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            equal = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
            sides = [node.left, *node.comparators]
            if isinstance(node.ops[0], equal) and any(map(texts_in, sides)):
                yield node.lineno, f"compares: {ast.unparse(node)}"
        elif isinstance(node, ast.Match):
            if any(values_in(case.pattern) for case in node.cases) and not ends_in_assert_never(
                node
            ):
                yield node.lineno, f"ends without assert_never: match {ast.unparse(node.subject)}"
        elif isinstance(node, ast.Dict) and len(node.keys) > 1:
            keys = [texts_in(key) if key is not None else set() for key in node.keys]
            found = frozenset().union(*keys)
            if all(keys) and not {found, found | {"auto"}} & set(CHOICES.values()):
                yield node.lineno, f"incomplete table of {sorted(found)}"


def test_every_decision_about_a_choice_is_exhaustive():
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for path in MODULES
        for line, what in half_decisions(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        'x = model.norm == "rmsnorm"',
        'x = "t5" != positions',
        'x = shape in ("constant", "inverse_sqrt")',
        'x = {"relu": 1, "gelu": 2}',
        'match kind:\n    case "conv" | "mean":\n        pass',
        'match kind:\n    case "conv":\n        pass\n    case _:\n        x = 2',
    ],
)
def test_the_rule_sees_each_form_of_half_a_decision(line):
    assert len(list(half_decisions(ast.parse(line)))) == 1


def test_the_rule_knows_the_choices_of_all_three_files():
    expected = {"model.positions", "optim.schedule.shape", "engine.precision", "model.feed_forward"}
    expected |= {"format", "tokenizer.kind", "shard_format", "container_runtime", "gpu"}
    assert expected <= CHOICES.keys()


def test_a_value_that_no_case_handles_is_an_error_of_ours():
    with pytest.raises(AssertionError, match="no case handles 'relu3'"):
        assert_never("relu3")  # type: ignore[arg-type]


def test_every_gpu_that_a_cluster_file_may_name_has_its_data_sheet():
    assert CHOICES["gpu"] == DEVICES.keys() - {"cpu"}
