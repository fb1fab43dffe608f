"""The README.md of a data set on the hub: its front matter names the files of each split."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from foundation.files import SMALL_FILE_BYTES, open_regular
from foundation.yaml_files import parse_yaml

CARD = "README.md"
# A split's name in the name of a file or folder: names that the hub knows, and other usual ones.
SPLIT = re.compile(
    r"(?<![a-z])(?:(?P<train>train(ing)?)|test(ing)?|eval(uation)?|val(id(ation)?)?"
    r"|dev(el(opment)?)?|h[eo]ld[-_ ]?outs?)[-_ ]?(set|data|split)?(?![a-z])"
)


def training_files(path: Path, folder: PurePosixPath, names: Collection[str]) -> list[str]:
    """Return the training files by the card at `path`, which is in `folder` of the input.

    Configurations with files among `names` are preferred, then the default one. A pattern that
    matches no name is returned itself. The list is empty if the card names no files.
    """
    with open_regular(path) as file:
        text = file.read(SMALL_FILE_BYTES).decode("utf-8-sig", "replace")
    before, *parts = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE)
    if before or len(parts) < 2 or "data_files" not in parts[0]:
        return []
    ranked: dict[tuple[bool, bool], list[tuple[str, list[str]]]] = defaultdict(list)
    for config in parse_yaml(parts[0], path, is_extended=True).get("configs") or ():
        files = [(split, _matching(names, path)) for split, path in _patterns(config, folder)]
        is_default = config.get("default") or config.get("config_name", "default") == "default"
        is_there = any(matching[0] in names for _, matching in files)
        ranked[is_there, bool(is_default)] += files
    training, held_out = list[str](), list[str]()
    for split, matching in ranked[max(ranked)] if ranked else ():
        is_held_out = (match := SPLIT.search(split.lower())) and not match["train"]
        (held_out if is_held_out else training).extend(matching)
    return sorted({*training} - {*held_out})


def _patterns(config: dict[str, Any], folder: PurePosixPath) -> Iterator[tuple[str, str]]:
    """Yield split and pattern of the files of a configuration, in any of the hub's forms."""
    entries = config.get("data_files") or []
    for entry in entries if isinstance(entries, list) else [entries]:
        paths_of: dict[str, Any] = {"train": entry} if isinstance(entry, str) else entry
        paths_of = {paths_of["split"]: paths_of["path"]} if "path" in paths_of else paths_of
        for split, paths in paths_of.items():
            for path in [paths] if isinstance(paths, str) else paths:
                yield split, str(folder / config.get("data_dir", "") / path)


def _matching(names: Collection[str], pattern: str) -> list[str]:
    """Return the names that match a pattern, else the pattern; only ** matches several folders."""
    depth = None if "**" in pattern else pattern.count("/")
    own = pattern.replace("**/", "*")
    matching = (n for n in names if depth in (None, n.count("/")) and fnmatchcase(n, own))
    return sorted(matching) or [pattern]
