"""The tokenizer of a model that xl-pretrain has trained, for Hugging Face transformers.

Ids and text are as in the corpus. The token that ends a document stands before each text, as if
after another document; `add_special_tokens=False` leaves it out. No text encodes to that token.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

try:  # a tokenizer of bytes does not need it
    import sentencepiece
except ImportError:
    sentencepiece = None

NUM_BYTES = 256
MODEL_NAME = "tokenizer.model"


class XLPretrainTokenizer(PreTrainedTokenizer):
    """A SentencePiece model, or bytes without one."""

    vocab_files_names = {"vocab_file": MODEL_NAME}  # noqa: RUF012  (transformers declares it so)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self, vocab_file: str | None = None, document_end_id: int = NUM_BYTES, **options: Any
    ) -> None:
        self.vocab_file = vocab_file
        self._processor: Any = None
        self._names = [f"<0x{byte:02X}>" for byte in range(NUM_BYTES)] + ["</s>"]
        self._end_id = document_end_id
        if vocab_file:
            if sentencepiece is None:
                raise ImportError(f"{vocab_file} needs sentencepiece; pip install sentencepiece")
            self._processor = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
            pieces = range(self._processor.get_piece_size())
            self._names = [self._processor.id_to_piece(piece) for piece in pieces]
        self._ids = {name: number for number, name in enumerate(self._names)}
        end = self._names[self._end_id]
        # A text is only text, even where it spells a special token.
        options |= {"bos_token": end, "eos_token": end, "split_special_tokens": True}
        options["document_end_id"] = document_end_id  # transformers saves it
        super().__init__(**{"padding_side": "right", **options})

    @property
    def vocab_size(self) -> int:
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        ids = list(text.encode()) if self._processor is None else self._processor.encode(text)
        return [self._names[number] for number in ids]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._text_of([self._ids[token] for token in tokens if token in self._ids])

    def _decode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, token_ids: Any, skip_special_tokens: bool = False, **options: Any
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(number) for number in token_ids]
        if skip_special_tokens:
            return self._text_of(ids)
        parts: list[list[int]] = [[]]
        for number in ids:
            if number == self._end_id:
                parts.append([])
            else:
                parts[-1].append(number)
        return self._names[self._end_id].join(map(self._text_of, parts))

    def _text_of(self, ids: list[int]) -> str:
        kept = [
            number for number in ids if number != self._end_id and 0 <= number < len(self._names)
        ]
        if self._processor is None:
            return bytes(kept).decode(errors="replace")
        return self._processor.decode(kept)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [self._end_id, *token_ids_0, *(token_ids_1 or [])]

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        if not self.vocab_file:
            return ()
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        target = Path(save_directory) / f"{prefix}{MODEL_NAME}"
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)
