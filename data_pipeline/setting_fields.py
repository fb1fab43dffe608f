"""Settings as dataclass fields: the range and unit of a number, and names.

They stand in the field's metadata, and its meaning as a docstring below it. Each settings class
calls `check_ranges` first, so every command that reads it refuses the same values, and rules
between settings may rely on the ranges.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from data_pipeline.checked_fields import is_sha256
from data_pipeline.credentials import problem_of
from data_pipeline.errors import ConfigError
from data_pipeline.files import path_text
from data_pipeline.yaml_files import abbreviated

RANGE, UNIT = "range", "unit"
MOST = 10**12  # of steps, tokens or bytes: more than any run has, and exact in float64
MOST_LANES = 1 << 17
MOST_ROWS = 1 << 20  # of a segment or a memory
MOST_THREADS = 4096
OBJECT_STORES = ("s3", "gs", "azure", "oci", "hf")  # schemes of URLs
LARGEST_SEED = (1 << 63) - 1
LONGEST_NAME = 100
_NAME = re.compile(rf"(?![-.])[A-Za-z0-9._+-]{{1,{LONGEST_NAME}}}")


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`; `above` and `below` leave out the number itself."""

    least: float
    most: float
    above: bool = False
    below: bool = False
    or_zero: bool = False  # 0 is allowed besides, where it turns something off

    def __contains__(self, value: float) -> bool:
        """Whether the range has the number; it never has NaN."""
        if self.or_zero and value == 0:
            return True
        enough = value > self.least if self.above else value >= self.least
        return enough and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        least, most = (
            f"{end:,.15g}" if end < 1e9 else f"{end:g}" for end in (self.least, self.most)
        )
        if not (self.above or self.below):
            text = f"from {least} to {most}"
        else:
            low = f"above {least}" if self.above else f"at least {least}"
            text = f"{low} and {f'below {most}' if self.below else f'at most {most}'}"
        return f"0, or {text}" if self.or_zero else text


def setting(
    default: Any = MISSING,
    allowed: Range | None = None,
    *,
    unit: str = "",
    also: str = "",
    default_factory: Any = MISSING,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Return a field of settings. Of a tuple of numbers, each must be in the range.

    `unit` names what a number counts or measures, such as tokens; then it may be written `10k`.
    """
    return field(
        default=default,
        default_factory=default_factory,
        metadata={RANGE: allowed, UNIT: unit, **(metadata or {})},
    )


def ranges_of(schema: Any) -> dict[str, Range]:
    """Return the ranges of a settings class, or of its instance, by the names of the fields."""
    found = {each.name: each.metadata.get(RANGE) for each in fields(schema)}
    return {name: allowed for name, allowed in found.items() if allowed is not None}


def assert_never(value: NoReturn) -> NoReturn:
    """End a `match` over a choice: pyright rejects it while a value of the choice is missing.

    (`typing.assert_never` needs Python 3.11.)
    """
    raise AssertionError(f"no case handles {value!r}")


def check_ranges(section: str, settings: Any) -> None:
    """Raise ConfigError if numbers of the settings are out of their ranges; it names all."""
    wrong = []
    for name, allowed in ranges_of(settings).items():
        value = getattr(settings, name)
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        if not all(each in allowed for each in values):
            found = abbreviated(value if values == [value] else values)
            wrong.append(f"{section}{name}={found} must be {allowed}")
    if wrong:
        raise ConfigError("; ".join(wrong))


def require_no_secrets(name_of: str, path: Path) -> None:
    """Raise ConfigError if `path` is a URL with a password: settings are copied and shown."""
    if problem := problem_of(path_text(path)):
        raise ConfigError(f"{name_of}: {problem}")


def require_object_store(name_of: str, url: str) -> None:
    """Raise ConfigError unless `url` names a place in an object store, without a password."""
    require_no_secrets(name_of, Path(url))
    scheme, _, rest = url.partition("://")
    if scheme not in OBJECT_STORES or not rest.strip("/") or url != path_text(Path(url)):
        expected = ", ".join(f"{each}://BUCKET/FOLDER" for each in OBJECT_STORES)
        raise ConfigError(f"{name_of}: found {abbreviated(url)}, expected one of {expected}")


def require_hash(name_of: str, text: str) -> None:
    """Raise ConfigError unless the text is a SHA-256, or empty."""
    if text and not is_sha256(text):
        raise ConfigError(
            f"{name_of}: found {abbreviated(text)}, expected 64 hexadecimal digits; "
            "`data-pipeline inspect` shows them"
        )


def require_name(name_of: str, name: str) -> None:
    """Raise ConfigError unless `name` can name a directory and a job, and is no option."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name_of}: found {abbreviated(name)}, expected 1 to {LONGEST_NAME} letters, digits "
            "and . _ + -, not beginning with . or -; choose such a name"
        )
