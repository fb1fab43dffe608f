"""The description of a run before it starts: parameters, FLOPs, memory, disk, time. Torch-free."""

from typing import Any

from foundation.cli import Answer
from foundation.progress import duration
from pretrain.config.engine import Attention, attention_in, described
from pretrain.config.phases import spans_of_phases
from pretrain.config.resolve import with_precision
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import Footprint, largest_footprint, largest_micro_batch
from pretrain.costs.fitting import advice
from pretrain.costs.flops import (
    Flops,
    Parameters,
    computed_step_flops,
    model_in_words,
    orthogonalizing_flops,
    parameter_counts,
    run_cost,
    token_flops,
)
from pretrain.costs.hardware import GIB, Hardware
from pretrain.costs.run_time import (
    SLOWER_WHILE_WRITING,
    RunTime,
    failure_costs,
    run_time,
    scored_tokens,
    split_here,
)
from pretrain.terminal.text import counted, si, step_time

# A GPU needs about this long to start a step's kernels: thousands, some microseconds each.
LAUNCH_BOUND_SECONDS = 0.01


def _device_name(hardware: Hardware) -> str:
    memory = f" with {hardware.device.memory / 1e9:,.0f} GB" if hardware.on_gpu else ""
    return hardware.name + memory


def describe(config: RunConfig, hardware: Hardware, mfu: float | None = None) -> Answer:
    """Return the description; its values are in bytes, seconds and FLOPs."""
    setting = config.engine.precision
    config = with_precision(config, best="bf16" if hardware.on_gpu else "fp32")
    engine = config.engine
    precision = engine.number_format + (f" ({setting})" if setting != engine.precision else "")
    parameters = parameter_counts(config.model)
    segment, segments = config.data.segment_length, config.optim.gradient_segments
    flops = token_flops(config.model, segment, config.data.lanes, segments)
    peak = hardware.device.peak(engine) * hardware.assumed_mfu(mfu)
    time = run_time(config, hardware.world_size, peak)
    footprint = largest_footprint(config, hardware.world_size, hardware.on_gpu)
    model = model_in_words(config)
    lines = [
        f"{config.name}: {counted(hardware.world_size, 'rank')} ({_device_name(hardware)}), "
        f"{engine.sharding}, {precision}, {'compiled, ' if engine.compiles else ''}"
        f"activation checkpointing {engine.activation_checkpointing}",
        model,
        *_model_lines(config),
        *_attention_lines(config, hardware),
        "",
        *_parameter_lines(parameters),
        "",
        *_flops_lines(flops, parameters),
        "",
        *_memory_lines(config, hardware, footprint),
        "",
        *_time_lines(config, hardware, time, hardware.assumed_mfu(mfu)),
        *_failure_lines(config, hardware, time.of_step[0]),
    ]
    values: dict[str, Any] = {
        "name": config.name,
        "model": model,
        "ranks": hardware.world_size,
        "device": hardware.name,
        "parameters": {"total": parameters.total, "body": parameters.body, **parameters.parts},
        "flops_per_token": {
            "training": flops.training,
            "forward": flops.forward,
            **flops.parts,
            "without_gradient": flops.without_gradient,
        },
        "device_bytes": {"total": footprint.device, **footprint.parts},
        "usable_device_bytes": hardware.usable_memory,
        "fits": footprint.device <= hardware.usable_memory,
        "offloaded_bytes": footprint.offloaded,
        "checkpoint_bytes": footprint.checkpoint,
        "disk_bytes": footprint.disk,
        "seconds": vars(time),
        "tokens_per_second": config.tokens_per_step / time.of_step[0],
    }
    return Answer("\n".join(lines), values)


def _model_lines(config: RunConfig) -> list[str]:
    """Return what is special about the model: muP, segments that teach each other."""
    model, segments, lines = config.model, config.optim.gradient_segments, []
    if model.facts:
        lines.append(model.facts.description)
    if model.base_width:
        lines.append(
            f"muP: {model.width_multiplier:g}x as wide as the base, model.base_width="
            f"{model.base_width}, whose rates and initial weights hold"
        )
    if segments > 1:
        lines.append(
            f"a step reads {segments} segments of each lane (optim.gradient_segments), whose "
            "memories carry gradients"
        )
    return lines


def _attention_lines(config: RunConfig, hardware: Hardware) -> list[str]:
    if not hardware.on_gpu or config.model.adopted:
        return []
    engine, model = config.engine, config.model
    attention = attention_in(engine, model, on_gpu=True)
    lines = [described(*attention)]
    for mixer in model.mixers_used:
        lines += mixer.paths(model, engine)
    if engine.attention_kernel == "atomic" and attention[0] is not Attention.PLAIN:
        unordered = f"engine.attention_kernel={engine.attention_kernel} sums in no fixed order"
        lines.append(f"a resume is not bitwise: {unordered}")
    return lines


def _parameter_lines(parameters: Parameters) -> list[str]:
    return [
        _row("parameters", f"{parameters.total:,}", f"({si(parameters.total)})"),
        _row("  body", f"{parameters.body:,}"),
        *(_row(_part(name), f"{count:,}") for name, count in parameters.parts.items() if count),
    ]


def _flops_lines(flops: Flops, parameters: Parameters) -> list[str]:
    six_nd = 6.0 * parameters.total
    passes = f"(forward {_flop(flops.forward)}, backward {_flop(flops.training - flops.forward)})"
    off = f"would be off by {six_nd / flops.training - 1:+.0%}"
    return [
        _row("FLOPs per token", _flop(flops.training), passes),
        *(_row(_part(name), _flop(count)) for name, count in flops.parts.items() if count),
        _row("  6N", _flop(six_nd), off),
    ]


def _part(name: str) -> str:
    return f"  {name.replace('_', '-')}"


def _memory_lines(run: RunConfig, hardware: Hardware, footprint: Footprint) -> list[str]:
    world_size, capacity = hardware.world_size, hardware.usable_memory
    micro = largest_micro_batch(footprint.run, world_size, capacity, hardware.on_gpu)
    if fits := footprint.device <= capacity:
        words = f"fits in {_gib(capacity)}; the largest micro-batch that fits is "
        words += counted(micro, "lane")
    else:
        words = f"DOES NOT FIT in {_gib(capacity)}"
    of_checkpoint = (
        f"({footprint.num_kept} kept, one being written: {_gib(footprint.disk)} of disk)"
    )
    name = "device memory" if hardware.on_gpu else "host memory"
    lines = [_row(name, _gib(footprint.device), f"per rank, {words}")]
    if not hardware.on_gpu:
        words = "not counted: Python, PyTorch and the engine take 0.5 to 1 GiB more"
        lines.append(_row("  runtime", "-", words))
    lines += [_row(f"  {part}", _gib(size)) for part, size in footprint.parts.items() if size]
    if footprint.offloaded:
        lines.append(
            _row("host memory", _gib(footprint.offloaded), "per rank, for what is offloaded")
        )
    if not fits:
        lines.append(_row("  to fit", "", advice(run, world_size, capacity, hardware.on_gpu)))
    lines.append(_row("checkpoint", _gib(footprint.checkpoint), of_checkpoint))
    if footprint.copy:
        lines.append(_row("  copy", _gib(footprint.copy), "of host memory per rank, while saving"))
    return lines


def _time_lines(config: RunConfig, hardware: Hardware, time: RunTime, mfu: float) -> list[str]:
    device, world_size = hardware.device, hardware.world_size
    spans = spans_of_phases(config, range(config.optim.steps))
    cost = run_cost(config)
    computed = sum(count * computed_step_flops(phase, world_size) for phase, count in spans)
    tokens_per_second = config.tokens_per_step / time.of_step[0]
    first = f"({config.tokens_per_step:,} tokens)"
    a_day = f"{si(86400 * tokens_per_second)} tokens a day"
    lines = [_row(f"at an MFU of {mfu:.0%}", f"{tokens_per_second:,.0f} tokens/s", a_day)]
    lines.append(_row("  step", step_time(time.of_step[0]), first))
    if hardware.on_gpu and time.of_step[0] < LAUNCH_BOUND_SECONDS:
        lines.append("  an upper bound: starting the kernels of so small a step takes longer")
    update = orthogonalizing_flops(config.model, config.optim) * config.optim.steps
    words = "of these FLOPs, in the time"
    if (repeated := computed - update - cost.flops) > 1e-9 * cost.flops:
        lines.append(_row("  recomputed", f"{repeated / cost.flops:.1%}", words))
    if update:
        lines.append(_row("  Muon", f"{update / cost.flops:.1%}", words))
    if len(spans) > 1:
        for number, ((phase, count), seconds) in enumerate(zip(spans, time.of_step, strict=True)):
            words = f"({phase.data.lanes} lanes x {phase.lane_tokens_per_step} = "
            words += f"{phase.tokens_per_step:,} tokens, {count:,} steps)"
            lines.append(_row(f"  phase {number}", step_time(seconds), words))
    words = f"({config.optim.steps:,} steps, {si(cost.tokens)} tokens, {_flop(cost.flops)})"
    lines.append(_row("  training", duration(time.training), words))
    lines.append(_evaluation_line(config, time))
    seconds = time.training + (time.evaluation or 0.0)
    hours = "GPU-hours" if hardware.on_gpu else "core-hours"
    words = f"({seconds * world_size / 3600:,.1f} {hours}, without starts and saves)"
    lines.append(_row("  run", duration(seconds), words))
    words = f"({config.engine.number_format}; {device.origin})"
    lines.append(_row("  peak of a rank", f"{_flop(device.peak(config.engine))}/s", words))
    if hardware.on_gpu and config.engine.number_format == "fp32":
        lines.append(_row("  with bf16", f"{_flop(device.bf16)}/s", "(engine.precision=bf16)"))
    return lines


def _evaluation_line(config: RunConfig, time: RunTime) -> str:
    if time.evaluation is None or time.tokens is None:
        whole = "whole splits, which are not all here"
        words = f"times {whole if time.sets else 'the whole validation split, which is not here'}"
        return _row("  evaluation", "?", f"({time.evaluations:,} {words})")
    twice = ", each with memory and without" if config.model.longest_memory else ""
    sets = f", and {counted(time.sets, 'set')} with it" if time.sets else ""
    tasks = ", without evaluation.tasks" if config.evaluation.tasks else ""
    text = f" {_scored_text(config) or f'{time.tokens:,} tokens'}"
    if (between := scored_tokens(config, config.data.path, is_last=False)) != time.tokens:
        text = f": the last{text}, the others {between:,}"
    words = f"({time.evaluations:,} times{text}{twice}{sets}{tasks})"
    return _row("  evaluation", duration(time.evaluation), words)


def _scored_text(config: RunConfig) -> str:
    """Return what the last evaluation scores; '' if the split is not on this machine."""
    if (split := split_here(config.data.path)) is None:
        return ""
    from data_pipeline.corpora.corpus import Corpus  # loads numpy, as does the next
    from data_pipeline.lanes.evaluation_stream import EvaluationStream, useful_lanes

    corpus, tokens = Corpus.open(split), config.evaluation.scored_tokens(is_last=True)
    length, most = config.data.segment_length, config.evaluation.lanes
    lanes = useful_lanes(corpus, most, length, tokens, heads=True)
    stream = EvaluationStream(corpus, lanes, length, range(1), tokens, heads=True)
    documents = counted(stream.all_documents, "document")
    return f"{stream.num_tokens:,} tokens of {documents} in {counted(lanes, 'lane')}"


def _failure_lines(config: RunConfig, hardware: Hardware, step_seconds: float) -> list[str]:
    """Return what failures cost; nothing if it is not known how often nodes fail."""
    node, costs = hardware.node, failure_costs(config, hardware)
    if node is None or costs is None:
        return []
    best, given = max(1, round(costs.best_interval / step_seconds)), config.checkpoint.interval
    at_best, at_given = (costs.goodput(steps * step_seconds) for steps in (best, given))
    nodes = counted(hardware.nodes, "node")
    saving = f"of {nodes} at {node.disk_mib_per_second:g} MiB/s each"
    if config.checkpoint.asynchronous:
        saving += f", training {SLOWER_WHILE_WRITING:.0%} slower meanwhile (assumed)"
    at_given_words = f"at best; {at_given:.1%} with checkpoint.interval={given} "
    at_given_words += f"({duration(given * step_seconds)})"
    advised = f"({duration(best * step_seconds)}, for checkpoint.interval)"
    return [
        "",
        _row("a failure every", duration(costs.between_failures), f"on average, one of {nodes}"),
        _row("  a save takes", duration(costs.write or costs.pause), saving),
        _row("  best interval", counted(best, "step"), advised),
        _row("  goodput", f"{at_best:.1%}", at_given_words),
    ]


def _row(name: str, value: str, note: str = "") -> str:
    return f"{name:<18}{value:>20}  {note}".rstrip()


def _flop(count: float) -> str:
    return f"{si(count)}FLOP"


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= 0.1 * GIB else f"{count / (1 << 20):,.2f} MiB"
