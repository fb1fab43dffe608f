"""Libraries of tokenizers in a child process, because others may have written their files.

With some files a library takes all memory, takes hours for a word, or aborts. The child has limits.
If it ends, only the text that it was encoding is an error; the next text gets another child.
Nothing is pickled: a message is JSON, then the bytes of its parts.
"""

import contextlib
import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from data_pipeline.vocabularies.huggingface import HuggingFaceTokenizer
from data_pipeline.vocabularies.sentencepiece_model import SentencePieceModel
from data_pipeline.vocabularies.tiktoken_ranks import TiktokenRanks
from data_pipeline.vocabularies.vocabulary import (
    InvalidVocabulary,
    UnencodableText,
    Vocabulary,
    encoding_errors,
)
from foundation.errors import ConfigError, DataError
from foundation.programs import own_command
from foundation.typed_values import json_text

MEMORY_BYTES, PER_BYTE = 4 << 30, 64  # limit for a child, plus 64 per byte of model and message
# Processor time of all threads of a child, plus some per byte: a busy machine changes nothing.
SECONDS, SECONDS_PER_BYTE = 30, 5e-5
MOST_GROWTH, SMALL = 256, 4096  # an answer has at most 256 bytes per byte asked, or 4096 bytes
# Signals that a file or text can end a child by; others, such as SIGKILL, come from the host.
ITS_FAULT = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGXCPU")
KINDS: dict[str, Callable[..., Vocabulary]] = {
    "sentencepiece": SentencePieceModel,
    "huggingface": HuggingFaceTokenizer,
    "tiktoken": TiktokenRanks,
}
ERRORS = {kind.__name__: kind for kind in (UnencodableText, InvalidVocabulary, ConfigError)}


class ConfinedVocabulary:
    """A vocabulary whose library runs in a child. Threads take turns; a forked process starts its
    own child."""

    end_text = ""

    def __init__(self, kind: str, model: bytes, **options: Any) -> None:
        self._first = {"kind": kind, "options": options}, model
        self._lock, self.vocab_size = threading.Lock(), 0
        self._start()

    def encode_many(self, texts: Sequence[str], num_threads: int) -> list[np.ndarray]:
        """Return one array of ids per text; releases the GIL."""
        with encoding_errors():
            parts = [text.encode() for text in texts]
        answer = self._ask("encode", parts, threads=num_threads)
        return [np.frombuffer(part, np.uint32) for part in answer]

    def decode(self, ids: Sequence[int]) -> str:
        return self._ask("decode", [np.array(ids, np.uint32).tobytes()])[0].decode()

    def token_texts(self) -> list[bytes]:
        return self._ask("texts")

    def _ask(self, name: str, parts: Iterable[bytes] = (), **details: int) -> list[bytes]:
        with self._lock:
            if self._child is None or self._owner != os.getpid():
                self._start()
            return self._exchange({"do": name, **details}, parts)[1]

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                own_command(__name__, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a library may print
                stderr=subprocess.DEVNULL,
            )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._child, self._pipe, self._owner)
        head, model = self._first
        limits = [MEMORY_BYTES, SECONDS]
        sizes = self._exchange({**head, "limits": limits}, [model])[0]["sizes"]
        self.vocab_size, self.end_id = sizes

    def _exchange(
        self, head: dict[str, Any], parts: Iterable[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        try:
            _send(self._pipe, head, parts)
            answer, content = _received(self._pipe)
        except (OSError, EOFError):
            raise self._error_of_end() from None
        except BaseException:  # such as Ctrl-C in the middle of a message
            self._end()
            self._child = None
            raise
        if error := ERRORS.get(answer.get("error", "")):
            raise error(answer["message"])
        return answer, content

    def _error_of_end(self) -> Exception:
        child, self._child = self._child, None
        assert child is not None
        self._end()
        how = "SIGABRT" if child.returncode >= 0 else signal.Signals(-child.returncode).name
        if how not in ITS_FAULT:
            return DataError(f"the process of the tokenizer was ended by {how}; run it again")
        reason = f"it takes more than {MEMORY_BYTES >> 30} GiB of host memory, or is damaged"
        if how == "SIGXCPU":
            reason = f"it takes more than {SECONDS} s"
        if self.vocab_size:
            return UnencodableText(f"the tokenizer fails: {reason}")
        return InvalidVocabulary(f"no tokenizer that can be used ({reason}); give another")


def _end(child: subprocess.Popen[bytes], pipe: Connection, owner: int) -> None:
    """Close the pipe to a child, and end the child unless another process, `owner`, started it."""
    pipe.close()
    if owner != os.getpid():
        child.returncode = 0
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1)
    child.kill()
    child.wait()


def _send(pipe: Connection, head: dict[str, Any], parts: Iterable[bytes] = ()) -> None:
    parts = list(parts)
    pipe.send_bytes(json_text({**head, "lengths": list(map(len, parts))}).encode())
    pipe.send_bytes(b"".join(parts))


def _received(pipe: Connection) -> tuple[dict[str, Any], list[bytes]]:
    head, whole = json.loads(pipe.recv_bytes()), pipe.recv_bytes()
    ends = np.cumsum([0, *head["lengths"]]).tolist()
    return head, [whole[start:end] for start, end in itertools.pairwise(ends)]


def main() -> None:
    """Run as the child: answer messages from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError), Connection(int(sys.argv[1])) as pipe:
        head, (model,) = _received(pipe)
        limit = partial(_limit, *head["limits"], len(model))
        limit(0)
        vocabulary: list[Vocabulary] = []

        def load() -> tuple[dict[str, Any], list[bytes]]:
            loaded = KINDS[head["kind"]](model, **head["options"])
            vocabulary.append(loaded)
            return {"sizes": [loaded.vocab_size, loaded.end_id]}, []

        _answer(pipe, load)
        while vocabulary:
            request, parts = _received(pipe)
            limit(sum(map(len, parts)))
            _answer(pipe, lambda of=request, parts=parts: ({}, _result(vocabulary[0], of, parts)))


def _limit(memory: int, seconds: int, model: int, content: int) -> None:
    """Limit data in memory and processor time until the next message.

    The address space has no limit: threads reserve much of it, and use little.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = used.ru_utime + used.ru_stime + seconds + (model + content) * SECONDS_PER_BYTE
    most = memory + (model + content) * PER_BYTE
    for kind, soft in ((resource.RLIMIT_DATA, most), (resource.RLIMIT_CPU, math.ceil(end))):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft if hard < 0 else min(soft, hard), hard))


def _answer(pipe: Connection, act: Callable[[], tuple[dict[str, Any], list[bytes]]]) -> None:
    try:
        head, parts = act()
    except tuple(ERRORS.values()) as error:
        head, parts = {"error": type(error).__name__, "message": str(error)}, []
    _send(pipe, head, parts)


def _result(vocabulary: Vocabulary, request: dict[str, Any], parts: list[bytes]) -> list[bytes]:
    with encoding_errors():
        if request["do"] == "encode":
            ids = vocabulary.encode_many([part.decode() for part in parts], request["threads"])
            answer = [text_ids.astype(np.uint32).tobytes() for text_ids in ids]
        elif request["do"] == "decode":
            answer = [vocabulary.decode(np.frombuffer(parts[0], np.uint32).tolist()).encode()]
        else:
            return vocabulary.token_texts()
    size, before = sum(map(len, answer)), sum(map(len, parts))
    if size > max(SMALL, MOST_GROWTH * before):
        raise UnencodableText(f"the tokenizer makes {size:,} bytes of {before:,}")
    return answer


if __name__ == "__main__":
    main()
