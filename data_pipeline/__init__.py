"""Text to token shards to lanes of segments.

It imports `foundation`, and neither torch, pretrain nor launcher. The names below are for use from
Python (docs/python.md); they are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_pipeline.config import CorpusConfig
    from data_pipeline.corpora.corpus import Corpus
    from data_pipeline.lanes.lane_stream import LaneStream
    from data_pipeline.tokenizer import Tokenizer

__all__ = ["Corpus", "CorpusConfig", "LaneStream", "Tokenizer"]
_HOMES = {
    "CorpusConfig": "data_pipeline.config",
    "Corpus": "data_pipeline.corpora.corpus",
    "LaneStream": "data_pipeline.lanes.lane_stream",
    "Tokenizer": "data_pipeline.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
