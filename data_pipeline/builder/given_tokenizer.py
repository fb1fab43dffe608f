"""The tokenizer in `tokenizer.path`: one of ours, or the files of another system.

Its kind follows from the file's name, its format and the settings, not from what library loads it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.config import TokenizerConfig, TokenizerKind
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.tokenizer import (
    DESCRIPTION_NAME,
    MODEL_NAME,
    TRAITS,
    Tokenizer,
    fingerprint_of,
    named_tokenizer,
    read_model,
    read_saved,
)
from data_pipeline.vocabularies.huggingface import end_token_of, special_tokens_of
from data_pipeline.vocabularies.vocabulary import LARGEST_MODEL_BYTES, InvalidVocabulary, usual_end
from data_pipeline.vocabularies.words import END_TOKEN, words_of_file
from foundation.errors import ConfigError, DataError
from foundation.files import read_json

HUGGING_FACE_NAME = DESCRIPTION_NAME  # tokenizer.json, as our own description is called
# Files beside a tokenizer.json that may say which token ends a text.
HUGGING_FACE_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
TIKTOKEN_SUFFIX = ".tiktoken"
RANK = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # Llama 3 calls such a file tokenizer.model


@dataclass(frozen=True)
class GivenTokenizer:
    """What a tokenizer's files say, not yet loaded by its library."""

    path: Path  # of the model
    kind: TokenizerKind
    model: bytes
    options: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """The hash that the loaded tokenizer has, too."""
        return fingerprint_of(self.kind, self.model, self.options)

    def load(self) -> Tokenizer:
        """Return the tokenizer; DataError if its library refuses the model."""
        return named_tokenizer(self.path, self.kind, self.model, self.options)


def given_tokenizer(path: Path, settings: TokenizerConfig) -> GivenTokenizer:
    """Return the tokenizer at `path`; DataError if it is not one, or has no end token."""
    if path.is_dir() and _holds_hugging_face(path):
        path = path / HUGGING_FACE_NAME
    if not path.is_file():
        inside = path / TOKENIZER_DIRECTORY
        if (inside / DESCRIPTION_NAME).is_file() and not (path / DESCRIPTION_NAME).exists():
            raise DataError(f"{path} is a corpus, not a tokenizer; give the one in it, {inside}")
        if path.is_dir() and not (path / DESCRIPTION_NAME).exists():
            models = [*path.glob("*.model"), *path.glob(f"*{TIKTOKEN_SUFFIX}")]
            advice = f"give {min(models)}" if models else "let its library write one"
            raise DataError(f"{path} has no {DESCRIPTION_NAME}; {advice}")
        return GivenTokenizer(path / MODEL_NAME, *read_saved(path))
    model = read_model(path)
    if TRAITS[settings.kind].is_list:
        end_token = settings.end_token or END_TOKEN
        try:
            model = words_of_file(model, end_token)
        except InvalidVocabulary as error:
            raise DataError(f"{path} is {error}") from None
        return GivenTokenizer(path, "words", model, {"end_token": end_token})
    if path.suffix == ".json":
        options = {"end_token": settings.end_token or _end_of_hugging_face(path, model)}
        return GivenTokenizer(path, "huggingface", model, options)
    if path.suffix == TIKTOKEN_SUFFIX or settings.pattern or RANK.match(model):
        return GivenTokenizer(path, "tiktoken", model, _tiktoken_options(path, settings))
    options = {"end_token": settings.end_token} if settings.end_token else {}
    return GivenTokenizer(path, "sentencepiece", model, options)


def _holds_hugging_face(directory: Path) -> bool:
    """Whether the directory's tokenizer.json is Hugging Face's, and not our description."""
    try:
        tree = read_json(directory / HUGGING_FACE_NAME, LARGEST_MODEL_BYTES)
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and "model" in tree and "fingerprint" not in tree


def _end_of_hugging_face(path: Path, model: bytes) -> str:
    try:
        companions = (path.with_name(name) for name in HUGGING_FACE_COMPANIONS)
        return end_token_of(*map(_companion, companions)) or usual_end(special_tokens_of(model))
    except ValueError as error:
        raise DataError(f"{path} is not a tokenizer of Hugging Face ({error})") from None


def _companion(path: Path) -> Any:
    try:
        return read_json(path) if path.exists() else None
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}); set tokenizer.end_token") from None


def _tiktoken_options(path: Path, settings: TokenizerConfig) -> dict[str, Any]:
    if not settings.pattern or not settings.special_tokens:
        raise ConfigError(
            f"{path} has ranks only; set tokenizer.pattern and tokenizer.special_tokens to those "
            "of its encoding (pat_str and special_tokens of tiktoken)"
        )
    return {
        "pattern": settings.pattern,
        "special_tokens": settings.special_tokens,
        "end_token": settings.end_token or usual_end(settings.special_tokens),
    }
