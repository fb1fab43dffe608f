"""Processes in which triton interprets its kernels, on the CPU.

The interpreter is chosen when triton is imported, so it needs a process of its own.
"""

import json
import os
import subprocess
from typing import Any

from foundation.programs import own_command

LAUNCH_OPTIONS = ("num_warps", "num_stages")
SECONDS = 850  # the interpreter is slow, and slower on a busy machine


def interpreted(module: str) -> Any:
    """What `python -m MODULE` prints as JSON while it interprets kernels."""
    command, environment = own_command(module), {**os.environ, "TRITON_INTERPRET": "1"}
    more = {"capture_output": True, "text": True, "timeout": SECONDS}
    finished = subprocess.run(command, env=environment, **more)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def prepare_interpreter() -> None:
    """In such a process, make the interpreter as strict as the compiler, and faster."""
    from triton.runtime import interpreter

    _refuse_unknown_arguments(interpreter)
    _patch_language_once(interpreter)


def _refuse_unknown_arguments(interpreter: Any) -> None:
    """Fail where a launch names an argument that its kernel lacks; the interpreter ignores it."""
    run = interpreter.GridExecutor.__call__

    def run_known(executor: Any, *values: Any, **named: Any) -> Any:
        unknown = named.keys() - {*executor.arg_names, *LAUNCH_OPTIONS}
        assert not unknown, f"{executor.fn.__name__} has no {sorted(unknown)}"
        return run(executor, *values, **named)

    interpreter.GridExecutor.__call__ = run_known


def _patch_language_once(interpreter: Any) -> None:
    """Patch `triton.language` once for each module of kernels, and for good.

    The interpreter does so whenever one jitted function calls another, which is more than half of
    its work.
    """
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            patch(function)
        return interpreter._LangPatchScope()  # which has nothing to restore

    interpreter._patch_lang = patch_once
