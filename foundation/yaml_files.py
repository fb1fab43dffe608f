"""YAML files as plain dicts: `extends`, `a.b=value` overrides, numbers such as 1e-3.

No other module imports PyYAML, and this one does it late: commands that read no file start fast.
"""

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from foundation.errors import ConfigError, did_you_mean, shown
from foundation.files import YAML_SUFFIXES, read_regular

Tree = dict[str, Any]
# The shipped configurations: a link to the repository's configs/; in a wheel, the files themselves.
SHIPPED = Path(__file__).parent / "configs"
# Settings are small: a file that exceeds these limits is a mistake or an attack.
LARGEST_YAML_BYTES = 1 << 20
MOST_FILES = 64  # files that one file may extend, directly or not
DEEPEST_NODE = 100  # levels of lists and sections
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, lone surrogates: no path can hold them
_OTHER_TAGS = [f"tag:yaml.org,2002:{name}" for name in ("set", "omap", "pairs", "binary")]
MOST_NODES = 20_000  # names and values of a file; reading them takes a second
TOO_DEEP = "it is nested too deeply"
LONGEST_INTEGER = 100  # characters of an integer
_FLOAT_TAG = "tag:yaml.org,2002:float"
_DATE_TAG = "tag:yaml.org,2002:timestamp"  # 2026-11-28 is text here
_INT_TAG = "tag:yaml.org,2002:int"
# Numbers of YAML 1.2. PyYAML implements 1.1, where 1e-3 without a dot is text, 5:00 is 300 (base
# 60), and 0300 is 192 (octal). Here 5:00 is text, and 0300 is refused: other readers disagree.
# Each pattern matches a text in at most one way: backtracking would take quadratic time.
_EXPONENT = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$", re.ASCII)
_FLOAT = re.compile(
    r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
    re.ASCII,
)
_INT = re.compile(r"[-+]?(0b[01_]+|0x[\da-fA-F_]+|\d[\d_]*)$", re.ASCII)
_LEADING_ZERO = re.compile(r"[-+]?0[\d_]+$", re.ASCII)
_NUMBERS = ((_FLOAT_TAG, _EXPONENT), (_FLOAT_TAG, _FLOAT), (_INT_TAG, _INT))
_FIRST_OF_NUMBERS = list("-+0123456789.")


class WrittenInt(int):
    """An integer of a YAML file that knows how it was written, for settings that are text."""

    written: str


class WrittenFloat(float):
    """A float of a YAML file that knows how it was written, for settings that are text."""

    written: str


def find_config(path: Path) -> Path:
    """Return `path`; if it is `configs/...` and missing, the shipped file of that name."""
    if path.parts[:1] != ("configs",) or path.exists():
        return path
    shipped = SHIPPED.joinpath(*path.parts[1:])
    return shipped if shipped.exists() else path


def read_tree(path: Path, whole: str = "", relative: str = "") -> Tree:
    """Return `path` merged over all files that it extends, as plain dicts of unchecked values.

    A section `whole` replaces the extended file's instead of being merged with it; `relative` is a
    path relative to the file that has it, and is returned with the file's directory before it.
    """
    return _read_tree(path, (), iter(range(MOST_FILES)), whole, relative)


def _read_tree(
    path: Path, extended_by: tuple[Path, ...], remaining: Iterator[int], whole: str, relative: str
) -> Tree:
    """Return the tree as `read_tree` does; take one item of `remaining` for each file."""
    if next(remaining, None) is None:
        raise ConfigError(
            f"{extended_by[0]} extends more than {MOST_FILES} files, counting a repeated one "
            "each time; extend fewer"
        )
    path = find_config(path)
    resolved = Path(os.path.realpath(path))  # Path.resolve fails at a link to itself
    if resolved in extended_by:
        chain = " -> ".join(item.name for item in (*extended_by, resolved))
        raise ConfigError(f"{path} extends itself: {chain}; remove one of these 'extends'")
    own = parse_yaml(_read_text(path, extended_by), path, is_extended=bool(extended_by))
    parents = own.pop("extends", None) or []
    parents = [parents] if isinstance(parents, str) else parents
    if not (isinstance(parents, list) and all(isinstance(parent, str) for parent in parents)):
        raise ConfigError(
            f"{path}: extends={shown(parents)} must be a file name or a list of file names"
        )
    merged: Tree = {}
    for parent in parents:
        above = (*extended_by, resolved), remaining, whole, relative
        merge(merged, _read_tree(path.parent / parent, *above))
    if whole in own:
        merged.pop(whole, None)
    if isinstance(own.get(relative), str):
        own[relative] = str(path.parent / own[relative])
    merge(merged, own)
    return merged


def _read_text(path: Path, extended_by: tuple[Path, ...]) -> str:
    wanted_by = f", which {extended_by[-1]} extends," if extended_by else ""
    try:
        return read_regular(path, LARGEST_YAML_BYTES).decode()
    except FileNotFoundError:
        parent = find_config(path.parent)
        names = [item.name for item in parent.glob("[!.]*.y*ml")] if parent.is_dir() else []
        hint = did_you_mean(path.name, names)
        raise ConfigError(f"{path}{wanted_by} does not exist{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}{wanted_by} is a directory; give a YAML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}{wanted_by} is not UTF-8 text (byte {error.start}); is it a YAML file?"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}{wanted_by} cannot be read ({error}); give a YAML file") from None


def parse_yaml(text: str, path: Path, is_extended: bool) -> Tree:
    """Return the settings in the text. If `is_extended`, no error quotes it: it may be private."""
    import yaml

    try:
        tree = _load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: also for an impossible date
        where = f"{path}{_place_of(error, text)}"
        problem = "" if is_extended else f": {_problem_of(error)}{_line_of(error, text)}"
        raise ConfigError(f"{where}: not valid YAML{problem}") from None
    if tree is None:
        raise ConfigError(f"{path} is empty, expected settings as 'name: value' lines; fill it")
    if not isinstance(tree, dict):
        text = "no settings" if is_extended else shown(tree)
        raise ConfigError(f"{path} holds {text}, expected settings as 'name: value' lines")
    return tree


def _problem_of(error: Exception) -> str:
    """Return the reason of the error, without the further lines that give its position."""
    return getattr(error, "problem", None) or str(error).partition("\n")[0]


def _place_of(error: Exception, text: str) -> str:
    """Return the error's position as `:LINE:COLUMN`; '' if it has none."""
    if mark := getattr(error, "problem_mark", None):
        return f":{mark.line + 1}:{mark.column + 1}"
    position = getattr(error, "position", None)  # errors about forbidden characters have it
    if position is None:
        return ""
    before = text[:position]
    return f":{before.count(chr(10)) + 1}:{position - before.rfind(chr(10))}"


def _line_of(error: Exception, text: str) -> str:
    """Return the line with the error as `, in 'key: [a'`; '' if it is unknown or blank."""
    mark, lines = getattr(error, "problem_mark", None), text.split("\n")
    line = lines[mark.line].strip() if mark and mark.line < len(lines) else ""
    return f", in {shown(line)}" if line else ""


def _load(text: str) -> Any:
    """Return the value of a YAML text; ValueError if it is nested too deeply or has aliases.

    Nine lists, each of nine aliases of the previous list, would expand to 400 million values.
    """
    import yaml

    loader, depth = _loader(), 0
    for number, event in enumerate(yaml.parse(text, Loader=loader)):
        if number > MOST_NODES:
            raise ValueError(f"it has more than {MOST_NODES:,} names and values")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"found the alias *{event.anchor}, expected a value; write it out")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_NODE:  # before a parser's stack is exhausted
            raise ValueError(TOO_DEEP)
    return yaml.load(text, Loader=loader)


@functools.cache
def _loader() -> Any:
    """Return PyYAML's safe loader, reading numbers as _NUMBERS; duplicate keys are errors."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml takes a fifth of the time

    class Loader(base):
        yaml_implicit_resolvers: ClassVar = {
            first: [pair for pair in pairs if pair[0] not in (_INT_TAG, _FLOAT_TAG, _DATE_TAG)]
            for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    def wrong(problem: str, node: yaml.Node) -> Exception:
        return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def int_of(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
        if _LEADING_ZERO.match(node.value):
            number = re.sub(r"^([-+]?)[0_]+(?=\d)", r"\1", node.value)
            raise wrong(
                f"{node.value} starts with 0: write {number}, or '{node.value}' for a text", node
            )
        if len(node.value) > LONGEST_INTEGER:
            raise wrong(f"an integer of {len(node.value):,} characters", node)
        number = WrittenInt(loader.construct_yaml_int(node))
        number.written = node.value
        return number

    def float_of(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
        number = WrittenFloat(loader.construct_yaml_float(node))
        number.written = node.value
        return number

    def text_of(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
        text = loader.construct_yaml_str(node)
        if _NO_TEXT.search(text):
            raise wrong(f"found {text[:60]!a}, expected text", node)
        return text

    def mapping_of(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise wrong(f"{shown(name)} is given twice", key)
            seen.add(name)
        return loader.construct_mapping(node, deep=True)

    def refuse(_: yaml.SafeLoader, node: yaml.Node) -> NoReturn:
        kind = node.tag.rpartition(":")[2]
        expected = "text, a number, a list or a section; write text in quotes"
        raise wrong(f"found a YAML {kind}, expected {expected}", node)

    for tag in (None, *_OTHER_TAGS):
        Loader.add_constructor(tag, refuse)
    for tag, form in _NUMBERS:
        Loader.add_implicit_resolver(tag, form, _FIRST_OF_NUMBERS)
    Loader.add_constructor(_INT_TAG, int_of)
    Loader.add_constructor(_FLOAT_TAG, float_of)
    Loader.add_constructor("tag:yaml.org,2002:str", text_of)
    Loader.add_constructor("tag:yaml.org,2002:map", mapping_of)
    return Loader


def parse_override(override: str) -> Tree:
    """Return `a.b=value` as the tree {a: {b: value}}; the value is read as YAML."""
    import yaml

    dotted, equals, text = override.partition("=")
    names = dotted.split(".")
    if not equals or not all(names):
        raise ConfigError(
            f"found the override {shown(override)}, "
            "expected section.name=value such as optim.steps=100"
        )
    try:
        value = _load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"override {shown(override)}: invalid YAML: {_problem_of(error)}"
        ) from None
    for name in reversed(names):
        value = {name: value}
    return value


def parse_overrides(overrides: Iterable[str]) -> Tree:
    """Return `a.b=value` overrides as one tree; the last of a setting holds."""
    tree: Tree = {}
    for override in overrides:
        merge(tree, parse_override(override))
    return tree


def merge(into: Tree, tree: Mapping[str, Any]) -> None:
    """Merge `tree` into `into`, in place: sections key by key, everything else as a whole."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            merge(into[key], value)
        elif value is not None or not isinstance(into.get(key), dict):
            into[key] = value  # but None over a section, as `model:` alone, removes nothing


def dump_yaml(tree: Any) -> str:
    """Return `tree` as YAML text that is read back as an equal value."""
    import yaml

    return yaml.dump(tree, Dumper=_dumper(), sort_keys=False, width=120)


@functools.cache
def _dumper() -> Any:
    """Return PyYAML's safe writer, extended: text that `_loader` reads as a number is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(WrittenInt, yaml.SafeDumper.represent_int)
    Dumper.add_representer(WrittenFloat, yaml.SafeDumper.represent_float)
    Dumper.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, _FIRST_OF_NUMBERS)
    return Dumper


def require_yaml_name(file: Path) -> None:
    """Raise ConfigError unless a file to be written has the name of a YAML file."""
    if file.suffix not in YAML_SUFFIXES:
        raise ConfigError(f"{file} does not end in .yaml; name it {file}.yaml")
