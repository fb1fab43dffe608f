"""`pretrain describe`: parameters, FLOPs, memory, disk and time before a run starts. Torch-free."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path

from data_pipeline.config_loader import load_config, parse_config
from data_pipeline.errors import ConfigError
from data_pipeline.fitted import print_fitted
from data_pipeline.program import add_experiment
from data_pipeline.progress import duration
from data_pipeline.yaml_files import read_tree
from pretrain.config.choices import precision_traits
from pretrain.config.phases import advice_on_phases, spans_of_phases
from pretrain.config.resolve import resolve_if_built
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import (
    checkpoint_bytes,
    largest_micro_batch,
    largest_phase,
    memory_parts,
    total_bytes,
)
from pretrain.costs.devices import CPU_MFU, DEVICES, GIB, GPU_MFU, USABLE, Device, NodeConfig
from pretrain.costs.flops import (
    Flops,
    Parameters,
    computed_flops_of_step,
    flops_of,
    flops_of_step,
    lanes_of_pass,
    parameters_of,
)
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.text import counted, si

NOTES_COLUMN = 40  # where notes and formulas start, after names of 18 columns and values of 20


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The ranks that a run is described for."""

    nodes: int
    ranks_per_node: int
    name: str  # of DEVICES

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def on_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def device(self) -> Device:
        return DEVICES[self.name]

    @property
    def usable_memory(self) -> float:
        """Bytes that a rank can use; on a CPU its part of this machine's."""
        if self.on_gpu:
            return USABLE * self.device.memory
        host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return USABLE * host_memory / self.ranks_per_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain describe`."""
    add_experiment(parser, "experiment or model file (YAML), or a run directory")
    parser.add_argument(
        "--cluster", type=Path, help="cluster file (configs/clusters/*.yaml) with GPUs per node"
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default 1)")
    parser.add_argument(
        "--gpus-per-node", type=int, help="ranks per node (default: the cluster's, else 1)"
    )
    parser.add_argument(
        "--gpu",
        choices=sorted(DEVICES),
        help="accelerator type of a rank (default: the cluster's, else cpu)",
    )
    parser.add_argument(
        "--mfu",
        type=float,
        help="assumed utilization of the peak, by all FLOPs (default 0.35, on a CPU 0.25)",
    )
    parser.add_argument("--explain", action="store_true", help="show the formula of each number")


def run(arguments: argparse.Namespace) -> int:
    """Print the description of the run."""
    hardware = hardware_of(arguments)
    path = arguments.experiment
    if path.is_dir():
        path = RunDir.open(path).config_file
    config = resolve_if_built(load_config(RunConfig, path, arguments.overrides))
    if config.initial_weights is not None and not arguments.experiment.is_dir():
        # Late: it imports torch, to compare shapes. A run that exists has its own weights.
        from pretrain.weights.initial_weights import check_initial_weights

        check_initial_weights(config)
    print_fitted(describe(config, hardware, arguments.mfu, arguments.explain), NOTES_COLUMN)
    return 0


def hardware_of(arguments: argparse.Namespace) -> Hardware:
    """Return the hardware of the cluster file, if one is given; the other options win over it."""
    for name in ("nodes", "gpus_per_node"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={value} must be 1 or more")
    ranks, gpu = arguments.gpus_per_node, arguments.gpu
    if arguments.cluster is not None:
        # The launcher checks the file's other settings, which are Slurm's.
        names = {field.name for field in fields(NodeConfig)}
        tree = {key: value for key, value in read_tree(arguments.cluster).items() if key in names}
        node = parse_config(NodeConfig, tree, source=str(arguments.cluster))
        if node.num_gpus and not (gpu or node.gpu_model):
            raise ConfigError(
                f"{arguments.cluster}: found no gpu, expected A100, H100 or H200; "
                "set it, or use --gpu"
            )
        ranks, gpu = ranks or node.tasks_per_node, gpu or node.gpu_model
    return Hardware(nodes=arguments.nodes, ranks_per_node=ranks or 1, name=gpu or "cpu")


def describe(
    config: RunConfig, hardware: Hardware, mfu: float | None = None, explain: bool = False
) -> list[str]:
    """Return all lines of the description."""
    engine, world_size = config.engine, hardware.world_size
    parameters = parameters_of(config.model)
    flops = flops_of(config.model, config.data.segment_length, lanes_of_pass(config, world_size))
    every = engine.checkpoint_every_n_layers
    return [
        f"{config.name}: {counted(world_size, 'rank')} ({hardware.name}), "
        f"ZeRO-{engine.zero_stage}, {engine.precision}, "
        f"activation checkpointing {engine.activation_checkpointing}"
        + (f" of one in {every} layers" if every > 1 else ""),
        "",
        *_parameter_lines(parameters, explain),
        "",
        *_flops_lines(flops, parameters, explain),
        "",
        *_memory_lines(largest_phase(config, world_size, hardware.on_gpu), hardware, explain),
        "",
        *_time_lines(config, hardware, mfu, explain),
        *(["", *_letter_lines(config, world_size)] if explain else ()),
    ]


def _parameter_lines(parameters: Parameters, explain: bool) -> list[str]:
    formulas = {
        "attention": "L d (2 h + 2 k), queries and output, keys and values; "
        "+ L d h for relative positions",
        "feed_forward": "L (2 d f + f + d); swiglu: L 3 d f",
        "norms": "L 4 d; rmsnorm: L 2 d",
        "biases": "u and v, 2 h, once or per layer; t5: buckets times heads",
        "compression": "L (c d d + d), learned compression only",
        "embedding": "V d, by bin",
        "head": "biases, cluster rows, projections; weights are the embedding's when tied",
    }
    return [
        f"parameters        {parameters.total:>20,}  ({si(parameters.total)})",
        f"  body            {parameters.body:>20,}",
        *(
            _row(name.replace("_", "-"), f"{getattr(parameters, name):,}", formula, explain)
            for name, formula in formulas.items()
        ),
    ]


def _flops_lines(flops: Flops, parameters: Parameters, explain: bool) -> list[str]:
    formulas = {
        "projections": "L 4 d (h + k (1 + M/T)): memory's keys and values are projected again "
        "in every segment",
        "positions": "L 2 d h K / (T B), relative positions only",
        "attention": "L 6 h K; without relative positions L 4 h K",
        "feed_forward": "L 4 d f; swiglu: L 6 d f",
        "compression": "L (2 d d + 2 d h + 4 (d k + h T) (1 + 1/c)), learned compression only",
        "head": "2 d V; tails of an adaptive softmax by Zipf's law",
    }
    six_nd = 6.0 * parameters.total
    return [
        f"FLOPs per token   {si(flops.training) + 'FLOP':>20}  (forward {si(flops.forward)}FLOP, "
        f"backward {si(flops.training - flops.forward)}FLOP)",
        *(
            _row(name.replace("_", "-"), f"{si(getattr(flops, name))}FLOP", formula, explain)
            for name, formula in formulas.items()
        ),
        f"  6N              {si(six_nd) + 'FLOP':>20}  "
        f"would be off by {six_nd / flops.training - 1:+.0%}",
    ]


def _memory_lines(config: RunConfig, hardware: Hardware, explain: bool) -> list[str]:
    world_size, capacity = hardware.world_size, hardware.usable_memory
    parts = memory_parts(config, world_size, hardware.on_gpu)
    total, saved = total_bytes(parts), checkpoint_bytes(config)
    kept = config.checkpoint.keep_last
    micro = largest_micro_batch(config, world_size, capacity, hardware.on_gpu)
    largest = f"the largest micro-batch that fits is {counted(micro, 'lane')}"
    name = "device memory" if hardware.on_gpu else "host memory"
    per_parameter = 16 if config.optim.ema_decay else 12
    return [
        f"{name:<18}{_gib(total):>20}  per rank, "
        f"{'fits' if total <= capacity else 'DOES NOT FIT'} in {_gib(capacity)}; "
        + (largest if micro else "not even one lane at a time fits"),
        *(_row(part.name, _gib(part.bytes), part.formula, explain) for part in parts),
        f"checkpoint        {_gib(saved):>20}  "
        f"({kept} kept, one being written: {_gib((kept + 1) * saved)} of disk)"
        + (f"  {per_parameter} P + M (L d b + 4) for every lane" if explain else ""),
        *(
            [_row("copy", _gib(saved / world_size), "of host memory per rank, while saving", True)]
            if config.checkpoint.asynchronous
            else []
        ),
    ]


def _time_lines(
    config: RunConfig, hardware: Hardware, mfu: float | None, explain: bool
) -> list[str]:
    device, precision = hardware.device, config.engine.precision
    if mfu is None:
        mfu = GPU_MFU if hardware.on_gpu else CPU_MFU
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu={mfu} must be above 0 and at most 1")
    world_size = hardware.world_size
    flops_per_second = world_size * device.peak(precision) * mfu
    spans = spans_of_phases(config, range(config.optim.steps))
    flops = sum(count * flops_of_step(phase, world_size) for phase, count in spans)
    computed = sum(count * computed_flops_of_step(phase, world_size) for phase, count in spans)
    tokens = sum(count * phase.tokens_per_step for phase, count in spans)
    seconds_of_step = [
        computed_flops_of_step(phase, world_size) / flops_per_second for phase, _ in spans
    ]
    tokens_per_second = config.tokens_per_step / seconds_of_step[0]
    seconds = computed / flops_per_second
    hours = "GPU-hours" if hardware.on_gpu else "core-hours"
    phases = [
        f"  phase {number:<10}{each:>18.3f} s  "
        f"({phase.data.lanes} lanes x {phase.data.segment_length} = "
        f"{phase.tokens_per_step:,} tokens, {count:,} steps)"
        for number, ((phase, count), each) in enumerate(zip(spans, seconds_of_step, strict=True))
    ]
    advice = advice_on_phases(config)
    formulas = (
        "  tokens/s = ranks x peak FLOPs per second x MFU / (FLOPs per token + recomputed ones)",
        "  step = data.lanes x data.segment_length tokens / tokens per second; "
        "run = optim.steps of them, by phase",
    )
    return [
        f"at an MFU of {mfu:.0%}  {tokens_per_second:>18,.0f} tokens/s, "
        f"{si(86400 * tokens_per_second)} tokens a day",
        f"  step            {seconds_of_step[0]:>18.3f} s  ({config.tokens_per_step:,} tokens)",
        *(
            [_row("recomputed", f"{computed / flops - 1:.1%}", "of these FLOPs, in the time", True)]
            if computed > flops
            else ()
        ),
        *(phases if len(spans) > 1 else ()),
        *([f"  {advice}"] if advice else ()),
        f"  run             {duration(seconds):>20}  "
        f"({config.optim.steps:,} steps, {si(tokens)} tokens, {si(flops)}FLOP, "
        f"{seconds * world_size / 3600:,.1f} {hours})",
        f"  peak of a rank  {si(device.peak(precision)) + 'FLOP/s':>20}  "
        f"({device.describe_peak(precision)})",
        *(formulas if explain else ()),
    ]


def _letter_lines(config: RunConfig, world_size: int) -> list[str]:
    """The letters of the formulas with their meanings and values."""
    model, segment = config.model, config.data.segment_length
    memory = model.memory_length + model.compressed_length
    letters: dict[str, tuple[str, int]] = {
        "L": ("layers", model.num_layers),
        "d": ("model.d_model", model.d_model),
        "h": ("heads times head width", model.num_heads * model.head_width),
        "k": ("key heads times head width", model.key_heads * model.head_width),
        "f": ("inner width of the feed-forward part", model.inner_width),
        "V": ("vocabulary, in bins where the softmax is adaptive", model.vocab_size),
        "c": ("compression rate of a compressed memory", model.compression_rate),
        "T": ("segment length", segment),
        "M": ("memory length, compressed rows among them", memory),
        "K": ("keys, T + M", segment + memory),
        "B": ("lanes of one forward pass on a rank", lanes_of_pass(config, world_size)),
        "R": ("ranks", world_size),
        "P": ("parameters", parameters_of(model).total),
        "b": ("bytes of an activation", precision_traits(config.engine.precision).bytes),
    }
    return [
        "letters" + (", with their values in the first phase" if config.data.phases else ""),
        *(
            _row(letter, f"{value:,}", meaning, True)
            for letter, (meaning, value) in letters.items()
        ),
        "  u and v are the two learned biases of relative attention",
    ]


def _row(name: str, value: str, formula: str, explain: bool) -> str:
    return f"  {name:<16}{value:>20}" + (f"  {formula}" if explain else "")


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= 0.1 * GIB else f"{count / (1 << 20):,.2f} MiB"
