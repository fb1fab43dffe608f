"""`python -m benchmarks static`: what each model of configs/models costs a GPU, without one.

static.json beside this file has the numbers of the last commit, and docs/performance.md shows them.
`--check` counts the models again, and compiles kernels again if their code has changed. It names
every number that is worse, and then `make check` fails. Tests count the slow ones again
(`compiled_layer`, `engines`: test_static_table.py and test_zero_memory.py of tests/integration).

* `kernels`: registers, memory and programs of each fused kernel, compiled for sm_90 with the
  models' options, and for every device with each option.
* `models`: `utilization` of the fused kernels in one layer, simulated: each program starts in the
  first free slot of 132 multiprocessors. Models that attend by `sdpa` take these kernels once
  documents are isolated. `operations` of torch, without views, and `launches` of our kernels are
  what a layer adds to each pass. They and `peak_gib` of weights, gradients and activations in bf16
  are counted on the `meta` device while LANES lanes train.
* `compiled_layer`: operations of a layer but for attention itself, both passes, without and with
  `engine.compile`.
* `reductions`: how often the host waits, how many collectives there are and what a rank sends in a
  backward pass of each ZeRO stage, counted with few ranks and computed for many (reductions.py).
* `engines`: values that the host waits for in a step, by package, and the bytes that ranks send,
  relative to one reduce-scatter of gradients and one all-gather of weights.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import importlib.metadata
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels import EVERY_OPTION, compiled
from benchmarks.measure import markdown_table
from benchmarks.meta import meta_as_gpu, model_on_meta, trained_on_meta
from benchmarks.reductions import (
    MANY_RANKS,
    RANKS,
    REDUCTION_COUNTS,
    computed_reductions,
    measured_reductions,
)
from foundation.files import read_json, write_json, write_text
from foundation.settings import load_config
from pretrain.config.engine import Attention, chosen_attention
from pretrain.config.model import POSITIONS, ModelConfig
from pretrain.config.run import RunConfig
from pretrain.kernels.triton.tiling import Tile, Workspace, backward_workspace, built_in_tiles
from tests.helpers.compiled_layer import num_operations
from tests.helpers.host_reads import measured_reads
from tests.helpers.live_tensors import (
    LiveTensors,
    measured_by_ranks,
    sending_cells,
    sent_over_minimum,
)

TABLE = Path(__file__).with_name("static.json")
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
KERNELS = ROOT / "pretrain" / "kernels" / "triton"
COMPILED_FILES = (
    "dropout.py", "kernels.py", "settings.py", "tiles.py", "tiling.py"
)  # fmt: skip
MULTIPROCESSORS, CAPABILITY = 132, (9, 0)  # of an H100 or H200
LANES, SENDING_RANKS = 8, 3
LANE_COUNTS = (1, 8, 16)  # for which utilization is simulated
HIGHER_IS_BETTER = ("utilization", "programs")  # lower is better for all other numbers
COMPILED = "xl_modern_1b"  # the model of the layer that is compiled
START, END = "<!-- python -m benchmarks static -->\n", "<!-- end -->"
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--check", action="store_true", help="compare with the table, write nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the table, or with `check` return 1 if a number is worse; print what is worse."""
    table = read_json(TABLE) if TABLE.exists() else {}
    code = code_of_kernels()
    kernels = table["kernels"] if table.get("code") == code else compiled_kernels()
    now: dict[str, Any] = {"kernels": kernels, "models": models_table(kernels)}
    now["reductions_of_many_ranks"] = reductions_of_many_ranks()
    if arguments.check:
        worse = differences({name: table[name] for name in now}, now)
    else:
        now |= {"code": code, "compiled_layer": compiled_layer(), "engines": measured_engines()}
        with tempfile.TemporaryDirectory() as directory:
            now["reductions"] = measured_reductions(Path(directory))
        worse = differences(table, now)
        write_json(TABLE, now)
        write_text(PAGE, with_table(PAGE.read_text(), now))
        print(f"{TABLE.name} and {PAGE.name}: written")
    print(*worse, f"{len(worse)} numbers are worse than in {TABLE.name}", sep="\n")
    return int(arguments.check and bool(worse))


def differences(table: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each number that is worse than in the table, or is in one of them only."""
    committed, counted = dict(_numbers(table)), dict(_numbers(now))
    lines = [
        f"{name}: expected in both tables; run 'python -m benchmarks static'"
        for name in sorted(committed.keys() ^ counted.keys())
    ]
    for name in sorted(committed.keys() & counted.keys()):
        change = counted[name] - committed[name]
        if (-change if any(word in name for word in HIGHER_IS_BETTER) else change) > 0:
            lines.append(f"{name}: found {counted[name]:g}, the table has {committed[name]:g}")
    return lines


def _numbers(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{name} ")
        elif isinstance(value, int | float):
            yield f"{path}{name}", value


def runs() -> dict[str, RunConfig]:
    """Return the models of configs/models by name."""
    paths = sorted((ROOT / "configs" / "models").glob("*.yaml"))
    # xl_modern.yaml has the settings that the models named after it extend.
    return {path.stem: load_config(RunConfig, path) for path in paths if path.stem != "xl_modern"}


def code_of_kernels() -> str:
    """Return a hash of the kernels' names, triton's version and the files they compile from."""
    words = [importlib.metadata.version("triton"), *all_kernel_names()]
    digest = hashlib.sha256(" ".join(words).encode())
    for name in COMPILED_FILES:
        digest.update((KERNELS / name).read_bytes())
    return digest.hexdigest()


def all_kernel_names() -> list[str]:
    """Return the names of all models' kernels, and of those with each option."""
    of_models = (kernel_names(run.model).values() for run in runs().values())
    return sorted({*EVERY_OPTION, *(name for names in of_models for name in names)})


def compiled_kernels() -> dict[str, Any]:
    """Return the resources of each kernel in `all_kernel_names`."""
    return {name: asdict(resources) for name, resources in compiled(all_kernel_names()).items()}


def kernel_names(model: ModelConfig) -> dict[str, str]:
    """Return the model's fused kernels, as `Tiles` and as `benchmarks kernels` name them."""
    positions = POSITIONS[model.positions]
    has_documents = chosen_attention("auto", model, on_gpu=True, is_half=True)[0] is Attention.SDPA
    options = {
        "documents": has_documents or model.isolate_documents,
        "dropout": model.attention_dropout > 0,
        "distance_bias": positions.adds_bias,
        "grouped": model.key_heads < model.num_heads,
        "no_position": not positions.projects_encodings,
    }
    names = {}
    for kernel in ("forward", "key_gradient", "query_gradient", "position_gradient"):
        if kernel == "position_gradient" and positions.rotates:
            continue
        # These two read score gradients that the keys' kernel has computed with dropout.
        multiplies = kernel in ("query_gradient", "position_gradient")
        words = [
            name
            for name, applies in options.items()
            if applies and not (multiplies and name == "dropout")
        ]
        names[kernel] = ":".join(
            [kernel, str(model.head_width), "90", *([",".join(words)] if words else [])]
        )
    return names


def models_table(kernels: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for each model."""
    with meta_as_gpu() as launches:
        return {name: _row(run, kernels, launches) for name, run in runs().items()}


def _row(run: RunConfig, kernels: Mapping[str, Any], launches: Counter[str]) -> dict[str, Any]:
    one, two = (_counted(run, layers, launches) for layers in (1, 2))
    return {
        "attention": chosen_attention("auto", run.model, on_gpu=True, is_half=True)[0].name.lower(),
        "utilization": {f"{lanes}": utilizations(run, lanes, kernels) for lanes in LANE_COUNTS},
        **{name: {each: two[name][each] - one[name][each] for each in one[name]} for name in one},
        "peak_gib": round(_counted_peak(run) / GIB, 2),
    }


def utilizations(run: RunConfig, lanes: int, kernels: Mapping[str, Any]) -> dict[str, float]:
    """Return the fraction of the multiprocessors' time that each kernel keeps busy in a layer."""
    model, queries = run.model, run.data.segment_length
    keys, tiles = queries + model.longest_memory, built_in_tiles(model.head_width, CAPABILITY)
    workspace, group_heads = workspace_of_run(run, lanes), model.num_heads // model.key_heads
    result = {}
    for kernel, name in kernel_names(model).items():
        tile = getattr(tiles, kernel)
        of_rows, of_columns = (
            steps_of_rows(queries, keys, tile),
            steps_of_columns(queries, keys, tile),
        )
        launches: list[list[int]] = []
        for chunk in workspace.chunks:  # programs in the order in which the kernel numbers them
            heads = chunk.groups * group_heads
            if kernel == "key_gradient":
                launches.append(programs_of_keys(workspace, of_columns, chunk.lanes * heads))
            elif kernel == "query_gradient":
                launches.append(of_rows * (chunk.lanes * heads))
            elif kernel == "position_gradient":  # which reads all lanes
                launches.append([chunk.lanes * steps for steps in of_columns[::-1]] * heads)
        if kernel == "forward":
            launches = [of_rows * (lanes * model.num_heads)]
        slots = MULTIPROCESSORS * kernels[name]["programs"]
        result[kernel] = round(utilization(launches, slots), 2)
    return result


def workspace_of_run(run: RunConfig, lanes: int) -> Workspace:
    """Return the workspace of a layer's backward pass."""
    model, queries = run.model, run.data.segment_length
    return backward_workspace(
        lanes=lanes,
        queries=queries,
        keys=queries + model.longest_memory,
        heads=model.num_heads,
        groups=model.key_heads,
        head_width=model.head_width,
        tiles=built_in_tiles(model.head_width, CAPABILITY),
        element_bytes=2,
    )


def steps_of_rows(queries: int, keys: int, tile: Tile) -> list[int]:
    """Return how many tiles of keys each tile of queries sees, the last queries first."""
    ends = (min(i0 + tile.rows, queries) + keys - queries for i0 in range(0, queries, tile.rows))
    return [-(-end // tile.columns) for end in ends][::-1]


def steps_of_columns(queries: int, keys: int, tile: Tile) -> list[int]:
    """Return how many tiles of queries see each tile of keys, the first keys first."""
    firsts = (max(0, j0 - (keys - queries)) // tile.rows for j0 in range(0, keys, tile.columns))
    return [-(-queries // tile.rows) - first for first in firsts]


def programs_of_keys(workspace: Workspace, steps: list[int], heads: int) -> list[int]:
    """Return the steps of each program of the keys' kernel, ordered by tile of keys, then head."""
    length = workspace.heads_per_program
    return [length * each for each in steps for _ in range(heads // length)]


def utilization(launches: list[list[int]], slots: int) -> float:
    """Return the fraction of the slots' time in use if programs start in the first free slot."""
    passed = 0
    for durations in launches:
        free = [0] * slots
        for duration in durations:
            heapq.heapreplace(free, free[0] + duration)
        passed += max(free)
    return sum(map(sum, launches)) / (slots * passed)


def _counted(run: RunConfig, num_layers: int, launches: Counter[str]) -> dict[str, dict[str, int]]:
    """Return operations and launches of each pass while a model of `num_layers` trains."""
    with Operations() as operations:
        module = model_on_meta(replace(run.model, num_layers=num_layers))
        result: dict[str, dict[str, int]] = {"operations": {}, "launches": {}}
        for name in trained_on_meta(module, run.data.segment_length, LANES):
            if name != "memory":
                result["operations"][name] = operations.count
                result["launches"][name] = launches.total()
            operations.count = 0
            launches.clear()
    return result


def _counted_peak(run: RunConfig) -> int:
    with LiveTensors(None, on_meta=True) as live:
        module = model_on_meta(run.model)
        for _ in trained_on_meta(module, run.data.segment_length, LANES):
            pass
    return live.peak


class Operations(TorchDispatchMode):
    """Counts torch's operations that are not views, in `count`, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def compiled_layer() -> dict[str, dict[str, int]]:
    """Return the operations of layers, eager and with `engine.compile`."""
    config = runs()[COMPILED].model
    small = replace(config, d_model=64, num_heads=4, d_head=16, d_inner=128, memory_length=8)
    if config.key_heads < config.num_heads:
        small = replace(small, num_key_heads=2)
    kinds = ("attention", "deltanet")
    return {kind: num_operations(replace(small, layer_kinds=(kind,))) for kind in kinds}


def measured_engines() -> dict[str, Any]:
    """Return what the host reads, and ranks send, in a step of each engine."""
    with tempfile.TemporaryDirectory() as directory:
        rows: dict[str, Any] = measured_reads(Path(directory))
        sent = measured_by_ranks(sending_cells(SENDING_RANKS), SENDING_RANKS, Path(directory))
        for name, ranks in sent.items():
            rows[name]["sent"] = sent_over_minimum(name, ranks)
    return rows


def reductions_of_many_ranks() -> dict[str, Any]:
    """Return what ZeRO-2 would take on many ranks, by how it may sum gradients."""
    run = runs()[COMPILED]
    return {f"{ranks}": computed_reductions(run, ranks) for ranks in MANY_RANKS}


def with_table(page: str, table: Mapping[str, Any]) -> str:
    """Return the page with the table as Markdown between its marks."""
    before, _, rest = page.partition(START)
    return before + START + markdown(table) + END + rest.partition(END)[2]


def markdown(table: Mapping[str, Any]) -> str:
    """Return the table as the page shows it."""
    counts_of_lanes = LANE_COUNTS[1:]  # one lane fills no device
    header = ["model", "attention", *(f"utilization, lanes: {lanes}" for lanes in counts_of_lanes)]
    models: dict[tuple[str, ...], list[str]] = {}  # a row's numbers -> the models that have them
    for name, run in runs().items():
        row, kernels = table["models"][name], kernel_names(run.model)
        utilized = [row["utilization"][f"{lanes}"] for lanes in counts_of_lanes]
        resources = [table["kernels"][each] for each in kernels.values()]
        numbers = (
            row["attention"],
            *(" ".join(f"{values[kernel]:.2f}" for kernel in kernels) for values in utilized),
            " ".join(f"{each['registers']}/{each['spilled']}" for each in resources),
            *(" + ".join(f"{row[count][each]}" for each in ("forward", "backward"))
              for count in ("operations", "launches")),
            f"{row['peak_gib']:.1f}",
        )  # fmt: skip
        models.setdefault(numbers, []).append(f"`{name}`")
    rows = [[*header, "registers / spilled B", "operations", "launches", "GiB"]]
    rows += [[", ".join(names), *numbers] for numbers, names in models.items()]
    engines = [["engine", "our reads", "DeepSpeed's reads", "bytes sent over the minimum"]]
    for name, row in sorted(table["engines"].items()):
        sent = f"{row['sent']:.2f}" if "sent" in row else "-"
        engines.append([name, f"{row['pretrain']}", f"{row['deepspeed']}", sent])
    layers = [[f"layer of `{COMPILED}`", "operations", "with `engine.compile`"]]
    for kind, counts in table["compiled_layer"].items():
        name = "Gated DeltaNet in its place" if kind == "deltanet" else "all between attentions"
        layers.append([name, f"{counts['eager']}", f"{counts['compiled']}"])
    many = sorted(table["reductions_of_many_ranks"].items(), key=lambda each: int(each[0]))
    computed = [f"{ranks}, `{COMPILED}`" for ranks, _ in many]
    reductions = [["ranks", *map(str, RANKS), *computed]]
    kinds = {"zero1": "", "zero2": "all-reduce", "zero2-reduce": "reduce", "zero3": ""}
    for name, kind in kinds.items():
        counts = [table["reductions"][name][f"{ranks}"] for ranks in RANKS]
        counts += [of_kinds.get(kind, {}) for _, of_kinds in many]
        shown = ("/".join(f"{each[key]:g}" for key in REDUCTION_COUNTS if each) for each in counts)
        reductions.append([name, *shown])
    tables = (rows, layers, engines, reductions)
    return "\n\n".join(markdown_table(each).strip() for each in tables) + "\n"
