"""Processes in which triton interprets its kernels, on the CPU.

The interpreter is chosen when triton is imported, so it needs a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SECONDS = 850  # the interpreter is slow, and slower on a busy machine


def interpreted(module: str) -> Any:
    """What `python -m MODULE` prints as JSON while it interprets kernels."""
    finished = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def patch_language_once() -> None:
    """In such a process, patch `triton.language` once for each module of kernels, and for good.

    The interpreter does so whenever one jitted function calls another, which is more than half of
    its work.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            patch(function)
        return interpreter._LangPatchScope()  # which has nothing to restore

    interpreter._patch_lang = patch_once
