"""What a run reads: its corpus or mixture, lanes and segments, and phases that change them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.config import CacheConfig, MixturePart
from foundation.errors import ConfigError
from foundation.files import url_of
from foundation.settings import (
    MOST,
    MOST_LANES,
    MOST_ROWS,
    Range,
    check_ranges,
    require_hash,
    require_no_secrets,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What changes from a step on; what is not set stays as before.

    With other lanes or another mixture the lanes restart, and memories are kept only if the number
    of lanes stays. With another segment length alone every lane continues, with its memory.
    """

    from_step: int = setting(allowed=Range(1, MOST), unit="steps")
    """Number of updates before the phase starts."""
    lanes: int = setting(0, Range(0, MOST_LANES), unit="lanes")
    """Lanes from then on; 0: as before."""
    segment_length: int = setting(0, Range(0, MOST_ROWS), unit="tokens")
    """Tokens of a segment from then on; 0: as before."""
    mixture: tuple[MixturePart, ...] = ()
    """Corpora from then on; []: as before."""

    def __post_init__(self) -> None:
        check_ranges("data.phases.", self)
        if not (self.lanes or self.segment_length or self.mixture):
            raise ConfigError(
                f"the phase of data.phases from step {self.from_step} on changes nothing; expected "
                "lanes, a segment length or a mixture"
            )

    @property
    def restarts_lanes(self) -> bool:
        """Whether the phase has other lanes than the one before."""
        return bool(self.lanes or self.mixture)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which corpus, in how many lanes. A segment is `lanes` rows of `segment_length` tokens."""

    path: Path = Path("data")
    """Corpus: directory (relative: to the working directory), or URL uploaded to; it may move."""
    manifest_hashes: tuple[str, ...] = ()
    """Each corpus trained on must have one of these: `data-pipeline inspect` shows it; []: any."""
    mixture: tuple[MixturePart, ...] = ()
    """Corpora to train on instead; tokenizer and validation split remain those of `path`."""
    lanes: int = setting(16, Range(1, MOST_LANES), unit="lanes")
    """Streams of text read side by side over all ranks: the rows of a batch."""
    segment_length: int = setting(64, Range(1, MOST_ROWS), unit="tokens")
    """Tokens of a segment; in a step each lane reads one, or `optim.gradient_segments`."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Cache of corpora named by a URL."""
    phases: tuple[PhaseConfig, ...] = ()
    """Other lanes, segments or corpora from given steps on; a resume may change later ones."""

    def __post_init__(self) -> None:
        check_ranges("data.", self)
        require_no_secrets("data.path", self.path)
        for each in self.manifest_hashes:
            require_hash("data.manifest_hashes", each)
        steps = [phase.from_step for phase in self.phases]
        if sorted(set(steps)) != steps:
            raise ConfigError(
                f"data.phases start at the steps {steps}; expected each to start after the one "
                "before"
            )

    @property
    def all_parts(self) -> tuple[MixturePart, ...]:
        """The parts of every mixture, also of those that phases change to."""
        return (*self.mixture, *(part for phase in self.phases for part in phase.mixture))

    def directory(self) -> Path:
        """Where to read the corpus: `path`, or this node's cache of a URL.

        Fetches the manifests and the tokenizer of a URL. DataError unless it has one of
        `manifest_hashes`, if there are any.
        """
        if url_of(self.path) is None and not self.manifest_hashes:
            return self.path
        from data_pipeline.corpora.corpus import pinned_directory

        return pinned_directory(self.path, self.cache, self.manifest_hashes)
