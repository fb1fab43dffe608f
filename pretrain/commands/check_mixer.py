"""`pretrain check-mixer KIND`: check that a kind of layer carries its state correctly."""

import argparse
from typing import Any

from foundation.cli import Answer, add_json, check_least
from foundation.errors import ConfigError
from foundation.yaml_files import merge, parse_override


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain check-mixer`."""
    add = parser.add_argument
    add("kind", help="kind of layer, named as in model.layer_kinds")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings, such as model.positions=rope")
    add("--seed", type=int, default=0, help="of shapes, weights and texts (default 0)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Return what each check found; the exit status is 0 if all passed, 1 if not."""
    check_least(arguments, 0, "seed")
    tree: dict[str, Any] = {}
    for override in arguments.overrides:
        merge(tree, parse_override(override))
    if others := sorted(tree.keys() - {"model"}):
        raise ConfigError(f"{others[0]}: not a setting of the model; use model.KEY=VALUE")
    from pretrain.mixers.check import check_mixer  # imports torch

    checks = check_mixer(arguments.kind, tree.get("model", {}), arguments.seed)
    passed = sum(check.passed for check in checks)
    lines = [*map(_line, checks), f"{arguments.kind}: {passed} of {len(checks)} checks passed"]
    rows = [{**vars(check), "passed": check.passed} for check in checks]
    return Answer(
        "\n".join(lines), {"kind": arguments.kind, "checks": rows}, int(passed < len(checks))
    )


def _line(check: Any) -> str:
    status = "ok    " if check.passed else "FAILED"
    result = check.note or f"{check.found:.2g}, at most {check.limit:g}"
    return f"{status}  {check.name:<11} {check.meaning}: {result}"
