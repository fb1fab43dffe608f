"""The tokenizer of an export, as far as transformers has its kind."""

import json
from typing import Any

from data_pipeline.tokenizer import MODEL_NAME, Tokenizer
from foundation.settings import assert_never
from foundation.typed_values import json_text

OWN_CLASS = "XLPretrainTokenizer"
CONFIG_NAME = "tokenizer_config.json"


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes] | None:
    """Return files by name; None if transformers has no such tokenizer."""
    match tokenizer.kind:
        case "unigram" | "bpe" | "sentencepiece":
            return {MODEL_NAME: tokenizer.model, CONFIG_NAME: _own_config(tokenizer)}
        case "bytes":
            return {CONFIG_NAME: _own_config(tokenizer)}
        case "huggingface":
            return {
                "tokenizer.json": _with_document_end(tokenizer),
                CONFIG_NAME: _json(_fast_config(str(tokenizer.options["end_token"]))),
            }
        case "tiktoken" | "words" | "characters" | "unknown":
            return None
        case _:
            assert_never(tokenizer.kind)


def _own_config(tokenizer: Tokenizer) -> bytes:
    auto_map = {"AutoTokenizer": [f"tokenization_xl_pretrain.{OWN_CLASS}", None]}
    end_id = tokenizer.end_id
    return _json({"tokenizer_class": OWN_CLASS, "auto_map": auto_map, "document_end_id": end_id})


def _fast_config(end_token: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_token,
        "eos_token": end_token,
        "split_special_tokens": True,  # a text is only text, even where it spells a special token
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        "model_input_names": ["input_ids", "attention_mask"],  # the inputs of the model
    }


def _with_document_end(tokenizer: Tokenizer) -> bytes:
    """Return the user's tokenizer.json, changed to put only a document's end before a text."""
    tree, end = json.loads(tokenizer.model), str(tokenizer.options["end_token"])

    def piece(kind: str, name: str, sequence: int = 0) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": sequence}}

    single = [piece("SpecialToken", end), piece("Sequence", "A")]
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, piece("Sequence", "B", 1)],
        "special_tokens": {end: {"id": end, "ids": [tokenizer.end_id], "tokens": [end]}},
    }
    return _json(tree)


def _json(tree: Any) -> bytes:
    return json_text(tree, indent=1, ensure_ascii=False).encode()
