"""`pretrain check-mixer`: check that a kind of layer, or a whole model, carries state correctly."""

import argparse
from pathlib import Path
from typing import Any

from foundation.cli import Answer, add_json, check_least
from foundation.errors import ConfigError
from foundation.yaml_files import parse_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain check-mixer`."""
    add = parser.add_argument
    add("kind", nargs="?", default="", help="kind of layer, named as in model.layer_kinds")
    add("--model", type=Path, metavar="HF_DIRECTORY", help="a checkpoint of Hugging Face instead")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings, such as model.positions=rope")
    add("--seed", type=int, default=0, help="of shapes, weights and texts (default 0)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Return what each check found; the exit status is 0 if all passed, 1 if not."""
    check_least(arguments, 0, "seed")
    tree = parse_overrides(arguments.overrides)
    if others := sorted(tree.keys() - {"model"}):
        raise ConfigError(f"{others[0]}: not a setting of the model; use model.KEY=VALUE")
    if bool(arguments.kind) == bool(arguments.model):
        raise ConfigError("name a kind of layer, or a directory with --model")
    name, checks = arguments.kind or arguments.model.name, _checks(arguments, tree.get("model", {}))
    passed = sum(check.passed for check in checks)
    lines = [*map(_line, checks), f"{name}: {passed} of {len(checks)} checks passed"]
    rows = [{**vars(check), "passed": check.passed} for check in checks]
    return Answer("\n".join(lines), {"kind": name, "checks": rows}, int(passed < len(checks)))


def _checks(arguments: argparse.Namespace, settings: Any) -> list[Any]:
    if arguments.kind:
        from pretrain.mixers.check import check_mixer  # imports torch

        return check_mixer(arguments.kind, settings, arguments.seed)
    from pretrain.weights.huggingface.adoption import adopted_model, check_adopted

    return check_adopted(adopted_model(arguments.model))


def _line(check: Any) -> str:
    status = "ok    " if check.passed else "FAILED"
    return f"{status}  {check.name:<11} {check.description}"
