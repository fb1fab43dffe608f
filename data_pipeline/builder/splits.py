"""Which split a document belongs to, and that no split of a build is empty."""

from __future__ import annotations

import math
from pathlib import Path

from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.formats import holds_stretches
from data_pipeline.builder.records import Reject, fraction_of
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig
from data_pipeline.corpora.manifest import SPLITS
from data_pipeline.errors import DataError

Sources = list[tuple[str, SourceFile]]  # with the split: "validation", or "" for either


def is_validation(document_id: str, config: CorpusConfig) -> bool:
    """Whether a document of `config.input` belongs to the validation split."""
    has_own = config.validation_input or config.validation_bytes
    return not has_own and fraction_of(document_id) < config.validation_fraction


def splits_of_build(config: CorpusConfig) -> tuple[str, ...]:
    """Return the splits that a build with these settings writes."""
    if holds_stretches(config):
        return SPLITS if config.validation_bytes else SPLITS[:1]
    return SPLITS if config.validation_input or config.validation_fraction else SPLITS[:1]


def check_sources(config: CorpusConfig, sources: Sources) -> None:
    """Raise DataError if a split would get no document, before hours of encoding.

    Reads only as far as the first document of each split. Copies of documents count, although
    `drop_duplicates` may drop them later.
    """
    documents, lowest = dict.fromkeys(splits_of_build(config), 0), 1.0
    rejects: list[Reject] = []
    for split, source in sources:
        targets = (split,) if split else ("train",) if config.validation_input else tuple(documents)
        if all(documents[target] for target in targets):
            continue
        for document in read_documents(source, config):
            if isinstance(document, Reject):
                rejects.append(document)
                if len(rejects) > config.max_rejects:
                    return  # the build will stop for this reason
                continue
            target = split or ("validation" if is_validation(document.id, config) else "train")
            documents[target] += 1
            lowest = min(lowest, fraction_of(document.id))
            if all(documents.values()):
                return
            if all(documents[target] for target in targets):
                break
    hint = ""
    if not config.validation_input and documents["train"] > 1:
        hint = f"; the smallest that gives it one is {_above(lowest):g}"
    if rejects:
        hint += (
            f"; the first of {len(rejects)} unusable records is {rejects[0].source}: "
            f"{rejects[0].reason}"
        )
    check_not_empty(config, documents, None, hint)


def check_not_empty(
    config: CorpusConfig, documents: dict[str, int], built: Path | None, hint: str = ""
) -> None:
    """Raise DataError if a required split has no documents.

    `built` is the directory to remove before building with other settings, if there is one.
    """
    if not documents["train"]:
        inputs = ", ".join(map(str, config.input))
        raise DataError(f"no documents for the training split in {inputs}{hint}")
    if documents.get("validation", 1):
        return
    remove = f", and remove {built}, which was built without" if built else ""
    if config.validation_input:
        inputs = ", ".join(map(str, config.validation_input))
        raise DataError(
            f"no documents for the validation split in validation_input={inputs}{hint}{remove}"
        )
    raise DataError(
        f"no documents for the validation split: validation_fraction="
        f"{config.validation_fraction} of {documents['train']} documents{hint}; raise it, set it "
        f"to 0 for no split, or name other text with validation_input{remove}"
    )


def _above(fraction: float) -> float:
    """A number of three decimals, or as many as it takes, just above a fraction below 1."""
    digits = max(3, 1 - math.floor(math.log10(fraction))) if fraction else 3
    rounded = (math.floor(fraction * 10**digits) + 1) / 10**digits
    return rounded if rounded < 1 else (1 + fraction) / 2
