"""What a compiled kernel does to a multiprocessor: tensor-core work, and programs that fit.

Needed are the products of tiles, each once. Executed are the instructions of the PTX times the
warps (or groups of four) that execute each. If a tile has fewer rows than its warps take, some
warps repeat what others do, and more is executed than needed.
"""

import re
from dataclasses import dataclass

REGISTERS = 1 << 16  # of a multiprocessor; a warp gets them in units of 256
LARGEST_WARPS = 64
TENSOR_COLUMNS = 512  # of the tensor memory of sm_100
RESERVED = 1024  # bytes of shared memory that each program costs beside its own
LARGEST_SPILL = 1024  # bytes per thread and kernel, stores and loads together
_DEPTH = 16  # of one instruction's product, for bf16


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes."""

    registers: int  # per thread
    spilled: int  # bytes, stores and loads
    shared: int  # bytes per program
    programs: int  # at the same time on one multiprocessor
    executed: int  # multiply-adds of tensor-core instructions
    needed: int  # multiply-adds of the products


@dataclass(frozen=True)
class Device:
    """Limits in bytes of shared memory."""

    of_program: int
    of_multiprocessor: int


LARGE = Device(227 << 10, 228 << 10)
DEVICES = {80: Device(163 << 10, 164 << 10), 90: LARGE, 100: LARGE}


def needed_work(ttgir: str) -> int:
    """Return the multiply-adds of all products in triton's last representation of whole tiles."""
    total = 0
    for line in ttgir.splitlines():
        if re.search(r"(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) ", line):
            types = line.partition(" : ")[2]
            (rows, depth), (_, columns) = re.findall(r"<(\d+)x(\d+)x", types)[:2]
            total += int(rows) * int(depth) * int(columns)
    return total


def executed_work(ptx: str, warps: int) -> int:
    """Return the multiply-adds of a program's tensor-core instructions."""
    constants = dict(re.findall(r"mov\.b32 \t(%r\d+), (\d+);", ptx))
    return sum(_work_of(line, warps, constants) for line in ptx.splitlines())


def _work_of(line: str, warps: int, constants: dict[str, str]) -> int:
    if shape := re.search(r"mma\.sync\.\S*?m(\d+)n(\d+)k(\d+)", line):
        rows, columns, depth = map(int, shape.groups())
        return warps * rows * columns * depth
    if shape := re.search(r"wgmma\.mma_async\S*?m(\d+)n(\d+)k(\d+)", line):
        rows, columns, depth = map(int, shape.groups())
        return warps // 4 * rows * columns * depth
    if descriptor := re.search(r"tcgen05\.mma\.\S+ .*, (%r\d+), %p\d+;", line):
        # One thread starts it for the program. Bits 17 to 22 are columns / 8, 24 to 28 rows / 16.
        bits = int(constants[descriptor[1]])
        return (bits >> 24 & 31) * 16 * (bits >> 17 & 63) * 8 * _DEPTH
    assert "tcgen05.mma" not in line, line
    return 0


def programs_per_multiprocessor(
    target: int, *, registers: int, shared: int, warps: int, tensor_columns: int = 0
) -> int:
    """Return how many programs run at the same time on one multiprocessor."""
    of_warp = -(-registers * 32 // 256) * 256
    limits = [
        REGISTERS // (of_warp * warps),
        DEVICES[target].of_multiprocessor // (shared + RESERVED),
        LARGEST_WARPS // warps,
    ]
    if tensor_columns:
        limits.append(TENSOR_COLUMNS // tensor_columns)
    return min(limits)


# On an H200 faster with one program than any tile of which two fit.
TIMED = "forward:128:90"


def missed_limits(wanted: str, found: Resources) -> list[str]:
    """Return the limits that a kernel "name:head width:compute capability[:options]" misses."""
    width, target = map(int, wanted.split(":")[1:3])
    has_pair = target == 90 and width in (64, 128) and wanted != TIMED
    least_programs = 2 if has_pair else 1
    most_shared, missed = DEVICES[target].of_program, []
    if found.executed != found.needed:
        missed.append(f"executes {found.executed} multiply-adds for {found.needed}")
    if found.spilled > LARGEST_SPILL:
        missed.append(f"spills {found.spilled} bytes, at most {LARGEST_SPILL}")
    if found.shared > most_shared:
        missed.append(f"takes {found.shared} bytes of shared memory, at most {most_shared}")
    if found.programs < least_programs:
        missed.append(f"{found.programs} programs fit, at least {least_programs}")
    return missed
