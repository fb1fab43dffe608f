"""The tokenizer in `tokenizer.path`: one of ours, or the files of another system.

Which kind it is follows from the name and the settings, never from what loads it successfully.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_pipeline.config import TokenizerConfig
from data_pipeline.corpora.manifest import TOKENIZER_DIRECTORY
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.files import LARGEST_DESCRIPTION_BYTES, read_json
from data_pipeline.tokenizer import (
    DESCRIPTION_NAME,
    Tokenizer,
    read_model,
    tokenizer_of_file,
    tokenizer_traits,
)
from data_pipeline.vocabularies.huggingface import end_token_of, special_tokens_of
from data_pipeline.vocabularies.vocabulary import LARGEST_MODEL_BYTES, InvalidVocabulary, usual_end
from data_pipeline.vocabularies.words import END_TOKEN, words_of_file

HUGGING_FACE_NAME = DESCRIPTION_NAME  # tokenizer.json, as our own description is called
# Files beside it that may say which token ends a text.
HUGGING_FACE_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
TIKTOKEN_SUFFIX = ".tiktoken"


def given_tokenizer(path: Path, settings: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer at `path`; DataError if it is not one, or its end is not known."""
    if path.is_dir() and _holds_hugging_face(path):
        path = path / HUGGING_FACE_NAME
    if not path.is_file():
        inside = path / TOKENIZER_DIRECTORY
        if (inside / DESCRIPTION_NAME).is_file() and not (path / DESCRIPTION_NAME).exists():
            raise DataError(f"{path} is a corpus, expected a tokenizer; give that in it, {inside}")
        return Tokenizer.load(path)
    if tokenizer_traits(settings.kind).is_list:
        return _of_words(path, settings)
    if path.suffix == ".json":
        return _of_hugging_face(path, settings)
    if path.suffix == TIKTOKEN_SUFFIX or settings.pattern:
        return _of_tiktoken(path, settings)
    options = {"end_token": settings.end_token} if settings.end_token else {}
    return tokenizer_of_file(path, "sentencepiece", options)


def _holds_hugging_face(directory: Path) -> bool:
    """Whether its tokenizer.json is one of Hugging Face, and not our description."""
    try:
        tree = read_json(directory / HUGGING_FACE_NAME, LARGEST_MODEL_BYTES)
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and "model" in tree and "fingerprint" not in tree


def _of_words(path: Path, settings: TokenizerConfig) -> Tokenizer:
    end_token = settings.end_token or END_TOKEN
    try:
        return Tokenizer(
            "words", words_of_file(read_model(path), end_token), {"end_token": end_token}
        )
    except (InvalidVocabulary, DataError) as error:
        raise DataError(f"{path} is {error}") from None


def _of_hugging_face(path: Path, settings: TokenizerConfig) -> Tokenizer:
    try:
        companions = (path.with_name(name) for name in HUGGING_FACE_COMPANIONS)
        stated = settings.end_token or end_token_of(*map(_companion, companions))
        end_token = stated or usual_end(special_tokens_of(read_model(path)))
    except ValueError as error:
        raise DataError(f"{path} is not a tokenizer of Hugging Face ({error})") from None
    return tokenizer_of_file(path, "huggingface", {"end_token": end_token})


def _companion(path: Path) -> Any:
    try:
        return read_json(path, LARGEST_DESCRIPTION_BYTES) if path.exists() else None
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}); set tokenizer.end_token") from None


def _of_tiktoken(path: Path, settings: TokenizerConfig) -> Tokenizer:
    if not settings.pattern or not settings.special_tokens:
        raise ConfigError(
            f"{path} has ranks only; set tokenizer.pattern and tokenizer.special_tokens to those "
            "of its encoding (pat_str and special_tokens of tiktoken)"
        )
    end_token = settings.end_token or usual_end(settings.special_tokens)
    options = {
        "pattern": settings.pattern,
        "special_tokens": settings.special_tokens,
        "end_token": end_token,
    }
    return tokenizer_of_file(path, "tiktoken", options)
