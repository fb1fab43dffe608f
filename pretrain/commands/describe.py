"""`pretrain describe`: parameters, FLOPs, memory, disk and time of a run before it starts. Torch-free."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from pretrain.config.phases import advice_on_phases, spans_of_phases
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import (
    checkpoint_bytes,
    largest_micro_batch,
    largest_phase,
    memory_parts,
    total_bytes,
)
from pretrain.costs.devices import CPU_MFU, DEVICES, GIB, GPU_MFU, USABLE
from pretrain.costs.flops import (
    Flops,
    Parameters,
    flops_of,
    flops_of_step,
    lanes_of_pass,
    parameters_of,
)
from pretrain.terminal.text import counted, duration, si


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain describe`."""
    parser.add_argument("config", type=Path, help="experiment or model file (YAML)")
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file"
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines (default %(default)s)")
    parser.add_argument(
        "--gpus-per-node", type=int, default=1, help="ranks on each (default %(default)s)"
    )
    parser.add_argument(
        "--gpu", choices=sorted(DEVICES), default="cpu", help="what a rank runs on (default cpu)"
    )
    parser.add_argument(
        "--mfu", type=float, help="part of the peak to reckon with (default 0.35, on a CPU 0.25)"
    )
    parser.add_argument("--explain", action="store_true", help="show each number's formula")


def run(arguments: argparse.Namespace) -> int:
    """Print what the run is made of and what it takes; 0, or 2 for settings that do not fit."""
    for name in ("nodes", "gpus_per_node"):
        if getattr(arguments, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')}={getattr(arguments, name)} must be 1 or more"
            )
    config = with_vocabulary(load_config(RunConfig, arguments.config, arguments.overrides))
    for line in described(config, arguments):
        print(line)
    return 0


def described(config: RunConfig, arguments: argparse.Namespace) -> list[str]:
    """All lines of the description."""
    world_size = arguments.nodes * arguments.gpus_per_node
    parameters = parameters_of(config.model)
    explain = bool(arguments.explain)
    return [
        f"{config.name}: {counted(world_size, 'rank')} ({arguments.gpu}), ZeRO-{config.engine.zero_stage}, "
        f"{config.engine.precision}, activation checkpointing {config.engine.activation_checkpointing}"
        + (
            f" of every {config.engine.checkpoint_every_n_layers} layers one"
            if config.engine.checkpoint_every_n_layers > 1
            else ""
        ),
        "",
        *_parameter_lines(parameters, explain),
        "",
        *_flops_lines(_flops(config, world_size), parameters, explain),
        "",
        *_memory_lines(
            largest_phase(config, world_size, arguments.gpu != "cpu"), arguments, world_size
        ),
        "",
        *_time_lines(config, arguments, world_size),
        *(["", *_letter_lines(config, world_size)] if explain else ()),
    ]


def _parameter_lines(parameters: Parameters, explain: bool) -> list[str]:
    formulas = {
        "attention": "L d (2 h + 2 k), queries and output, keys and values; + L d h for relative positions",
        "feed_forward": "L (2 d f + f + d); swiglu: L 3 d f",
        "norms": "L 4 d; rmsnorm: L 2 d",
        "biases": "u and v, 2 h, once or per layer; t5: buckets times heads",
        "compression": "L (c d d + d), learned compression only",
        "embedding": "V d, by bin",
        "head": "biases, cluster rows, projections; weights are the embedding's when tied",
    }
    rows = [
        _row(name.replace("_", "-"), f"{getattr(parameters, name):,}", formulas[name], explain)
        for name in formulas
    ]
    return [
        f"parameters        {parameters.total:>20,}  ({si(parameters.total)})",
        f"  body            {parameters.body:>20,}",
        *rows,
    ]


def _flops_lines(flops: Flops, parameters: Parameters, explain: bool) -> list[str]:
    formulas = {
        "projections": "L 4 d (h + k (1 + M/T)): memory's keys and values are projected again in every segment",
        "positions": "L 2 d h K / (T B), relative positions only",
        "attention": "L 6 h K; without relative positions L 4 h K",
        "feed_forward": "L 4 d f; swiglu: L 6 d f",
        "compression": "L (2 d d + 2 d h + 4 (d k + h T) (1 + 1/c)), learned compression only",
        "head": "2 d V; tails of an adaptive softmax by Zipf's law",
    }
    rows = [
        _row(name.replace("_", "-"), f"{si(getattr(flops, name))}FLOP", formulas[name], explain)
        for name in formulas
    ]
    six_nd = 6.0 * parameters.total
    return [
        f"FLOPs per token   {si(flops.training) + 'FLOP':>20}  (forward {si(flops.forward)}FLOP, "
        f"backward {si(flops.training - flops.forward)}FLOP)",
        *rows,
        f"  6N              {si(six_nd) + 'FLOP':>20}  would be off by {six_nd / flops.training - 1:+.0%}",
    ]


def _memory_lines(config: RunConfig, arguments: argparse.Namespace, world_size: int) -> list[str]:
    explain = bool(arguments.explain)
    on_gpu = arguments.gpu != "cpu"
    saved = config.checkpoint
    copy = "of host memory per rank, while training goes on beside the writing"
    parts = memory_parts(config, world_size, on_gpu)
    room = _room(arguments)
    total = total_bytes(parts)
    verdict = "fits" if total <= room else "DOES NOT FIT"
    micro = largest_micro_batch(config, world_size, room, on_gpu)
    largest = f"the largest micro-batch that fits is {counted(micro, 'lane')}"
    advice = largest if micro else "not even one lane at a time fits"
    per_parameter = 16 if config.optim.ema_decay else 12
    return [
        f"memory per rank   {_gib(total):>20}  {verdict} in {_gib(room)}; {advice}",
        *(_row(part.name, _gib(part.bytes), part.formula, explain) for part in parts),
        f"checkpoint        {_gib(checkpoint_bytes(config)):>20}  "
        f"({saved.keep_last} kept, one being written: {_gib((saved.keep_last + 1) * checkpoint_bytes(config))} of disk)"
        + (f"  {per_parameter} P + M (L d b + 4) for every lane" if explain else ""),
        *(
            [_row("copy", _gib(checkpoint_bytes(config) / world_size), copy, True)]
            if saved.asynchronous
            else []
        ),
    ]


def _time_lines(config: RunConfig, arguments: argparse.Namespace, world_size: int) -> list[str]:
    device, precision = DEVICES[arguments.gpu], config.engine.precision
    usual = CPU_MFU if arguments.gpu == "cpu" else GPU_MFU
    mfu = usual if arguments.mfu is None else arguments.mfu
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu={mfu} must be above 0 and at most 1")
    flops_per_second = world_size * device.peak(precision) * mfu
    spans = spans_of_phases(config, range(config.optim.steps))
    flops = sum(count * flops_of_step(phase, world_size) for phase, count in spans)
    tokens = sum(count * phase.tokens_per_step for phase, count in spans)
    seconds_of_step = [flops_of_step(phase, world_size) / flops_per_second for phase, _ in spans]
    tokens_per_second, seconds = (
        config.tokens_per_step / seconds_of_step[0],
        flops / flops_per_second,
    )
    hours = "core-hours" if arguments.gpu == "cpu" else "GPU-hours"
    formulas = [
        "  tokens/s = ranks x peak FLOPs per second x MFU / FLOPs per token",
        "  step = data.lanes x data.segment_length tokens / tokens per second; run = optim.steps of them, by phase",
    ]
    return [
        f"at an MFU of {mfu:.0%}  {tokens_per_second:>18,.0f} tokens/s, {si(86400 * tokens_per_second)} tokens a day",
        f"  step            {seconds_of_step[0]:>18.3f} s  ({config.tokens_per_step:,} tokens)",
        *(
            f"  phase {number:<10}{each:>18.3f} s  ({phase.data.lanes} lanes x {phase.data.segment_length} = "
            f"{phase.tokens_per_step:,} tokens, {count:,} steps)"
            for number, ((phase, count), each) in enumerate(
                zip(spans, seconds_of_step, strict=True)
            )
            if len(spans) > 1
        ),
        *(f"  {advice}" for advice in [advice_on_phases(config)] if advice),
        f"  run             {duration(seconds):>20}  ({config.optim.steps:,} steps, {si(tokens)} tokens, "
        f"{si(flops)}FLOP, {seconds * world_size / 3600:,.1f} {hours})",
        f"  peak of a rank  {si(device.peak(precision)) + 'FLOP/s':>20}  ({device.peak_in_words(precision)})",
        *(formulas if arguments.explain else ()),
    ]


def _flops(run: RunConfig, world_size: int) -> Flops:
    return flops_of(run.model, run.data.segment_length, lanes_of_pass(run, world_size))


def _letter_lines(config: RunConfig, world_size: int) -> list[str]:
    """What the formulas' letters stand for, with their values in this run."""
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
        "b": ("bytes of an activation", 4 if config.engine.precision == "fp32" else 2),
    }
    rows = [
        _row(letter, f"{value:,}", meaning, True) for letter, (meaning, value) in letters.items()
    ]
    heading = "letters" + (", with their values in the first phase" if config.data.phases else "")
    return [heading, *rows, "  u and v are the two learned biases of relative attention"]


def _room(arguments: argparse.Namespace) -> float:
    if arguments.gpu != "cpu":
        return USABLE * DEVICES[arguments.gpu].memory
    return (
        USABLE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / arguments.gpus_per_node
    )


def _row(name: str, value: str, formula: str, explain: bool) -> str:
    return f"  {name:<16}{value:>20}" + (f"  {formula}" if explain else "")


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= 0.1 * GIB else f"{count / (1 << 20):,.2f} MiB"
