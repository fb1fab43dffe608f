"""The fused kernels compiled without a GPU: what each takes of a multiprocessor.

It cannot share a process with the interpreter, which replaces what would be compiled. Run as a
module it compiles what the arguments name, "kernel:head width:compute capability[:option,option]",
and prints a line of JSON for each: its name, and what it takes.
"""

import contextlib
import io
import json
import re
import sys
from typing import Any

from pretrain.kernels.triton.settings import Variant
from pretrain.kernels.triton.tiling import CHUNK, Tile, built_in_tiles
from tests.helpers.kernel_work import (
    Resources,
    executed_work,
    needed_work,
    programs_per_multiprocessor,
)

NUM_HEADS = 16
DROPOUT = "dropout:0:"  # which knows no heads
FLOAT32_POINTERS = {"distance_biases", "sinks", "log_sums", "deltas", "query_sums", "score_sums"}
FLOAT32_POINTERS |= {"content_sums", "position_gradients", "distance_bias_gradients"}
INT32_POINTERS = {"first_keys", "query_ends"}
# What the launcher sees as multiples of 16 when segment and memory are the usual powers of two.
EVEN_INTEGERS = {"key_lane", "value_lane", "L", "M", "window", "score_row"}
STRIDES = {"key_head", "value_head"}  # of heads: their width
ODD_INTEGERS = set(CHUNK)
OPTIONS: dict[str, dict[str, Any]] = {
    "documents": {"has_starts": True},
    "dropout": {"drop_threshold": 6554},
    "distance_bias": {"has_distance_bias": True},
    "sinks": {"has_sinks": True},
    "no_position": {"has_position": False},
    "adds_positions": {"adds_positions": True},
    "grouped": {"num_groups": 4, "heads_per_program": 4},
    "split": {"num_groups": 4},  # each head of a group in its own program
}


def compiled(
    kernel: str, variant: Variant, tile: Tile, capability: int, dtype: str = "bf16"
) -> tuple[Any, Resources]:
    """The compiled kernel and what it takes, for bf16 tensors of the usual alignment."""
    function = kernels()[kernel]
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name == "VARIANT" else _type_of(name, dtype)
        is_even = name in EVEN_INTEGERS or (name in STRIDES and variant.head_width % 16 == 0)
        if is_even or signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return _compiled(function, signature, {"VARIANT": variant}, attributes, tile, capability)


def compiled_dropout(capability: int) -> tuple[Any, Resources]:
    """The kernel of dropout, of bf16 values whose number is a multiple of 16."""
    from pretrain.kernels.triton import dropout

    constants = {"IS_LANE_FIRST": True, "THRESHOLD": 6554, "SCALE": 65536 / (65536 - 6554)}
    constants["BLOCK"] = dropout.BLOCK
    types = {"values": "*bf16", "outputs": "*bf16", "lanes": "*i64"}
    types |= dict.fromkeys(constants, "constexpr")
    signature, attributes = {}, {}
    for index, name in enumerate(dropout.drop_kernel.arg_names):
        signature[name] = types.get(name, "i32")
        if name in ("values", "outputs", "lanes", "count", "inner"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    tile = Tile(16, 16, dropout.WARPS)  # only its warps matter
    return _compiled(dropout.drop_kernel, signature, constants, attributes, tile, capability)


def _compiled(
    function: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    attributes: dict[tuple[int], Any],
    tile: Tile,
    capability: int,
) -> tuple[Any, Resources]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # else the log is missing on the second run
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        binary = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": tile.warps, "num_stages": tile.stages},
        )
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    registers = re.findall(r"Used (\d+) registers", log.getvalue())
    assert len(spills) == len(registers) == 1, log.getvalue()
    used = {"registers": int(registers[0]), "shared": binary.metadata.shared}
    columns = binary.metadata.tmem_size or 0
    return binary, Resources(
        **used,
        spilled=sum(map(int, spills[0])),
        programs=programs_per_multiprocessor(
            capability, **used, warps=tile.warps, tensor_columns=columns
        ),
        executed=executed_work(binary.asm["ptx"], tile.warps),
        needed=needed_work(binary.asm["ttgir"]),
    )


def plain_variant(head_width: int, tile: Tile, **options: Any) -> Variant:
    """Positions, no documents, no dropout, no biases."""
    row = 2 * NUM_HEADS * head_width
    settings: dict[str, Any] = {
        "num_heads": NUM_HEADS, "num_groups": NUM_HEADS, "head_width": head_width, "key_row": row,
        "value_row": row, "rows": tile.rows, "columns": tile.columns, "has_position": True,
        "has_starts": False, "has_distance_bias": False, "has_sinks": False, "drop_threshold": 0,
        "adds_positions": False, "heads_per_program": 1, "precision": "tf32",
    }  # fmt: skip
    return Variant(**settings | options)


def resources_of(wanted: str) -> Resources:
    """Return what a kernel needs: "kernel:head width:compute capability[:option,option]"."""
    if wanted.startswith(DROPOUT):
        return compiled_dropout(int(wanted.rpartition(":")[2]))[1]
    kernel, head_width, capability, *options = wanted.split(":")
    tiles = built_in_tiles(int(head_width), divmod(int(capability), 10), is_timed=not options)
    tile = getattr(tiles, kernel)
    chosen: dict[str, Any] = {}
    for name in options[0].split(",") if options else ():
        chosen |= OPTIONS[name]
    variant = plain_variant(int(head_width), tile, **chosen)
    return compiled(kernel, variant, tile, int(capability))[1]


def kernels() -> dict[str, Any]:
    from pretrain.kernels.triton.kernels import (
        forward_kernel,
        key_gradient_kernel,
        position_gradient_kernel,
        query_gradient_kernel,
    )

    return {
        "forward": forward_kernel,
        "query_gradient": query_gradient_kernel,
        "key_gradient": key_gradient_kernel,
        "position_gradient": position_gradient_kernel,
    }


def _type_of(name: str, dtype: str) -> str:
    if name in EVEN_INTEGERS | ODD_INTEGERS | STRIDES:
        return "i32"
    if name == "dropout_keys":
        return "*i64"
    if name in INT32_POINTERS:
        return "*i32"
    return "*fp32" if name in FLOAT32_POINTERS else f"*{dtype}"


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(json.dumps([each, vars(resources_of(each))]), flush=True)
