"""A new experiment for a corpus: settings that run as they are, as a commented file.

Shape, batch and learning rate start from the shipped model of the nearest size
(configs/models/xl_modern_*.yaml). A small corpus gets fewer lanes and shorter segments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.manifest import read_manifest
from data_pipeline.corpora.remote_corpus import local_corpus_directory
from data_pipeline.lanes.lane_plan import comfortable_lanes
from foundation.errors import ConfigError
from foundation.files import refuse_overwrite
from foundation.paths import absolute
from foundation.settings import load_config, parse_config, require_name
from foundation.typed_values import json_text, to_tree
from foundation.yaml_files import SHIPPED, dump_yaml, merge, parse_overrides, require_yaml_name
from pretrain.config.engine import EngineConfig
from pretrain.config.model import MOST_HEADS, ModelConfig
from pretrain.config.run import DataConfig, EvaluationConfig, RunConfig
from pretrain.costs.flops import run_cost
from pretrain.costs.run_time import run_time
from pretrain.scaling.intervals import amount
from pretrain.scaling.recipe import Family, grouped_key_heads, power_of_two, with_steps
from pretrain.terminal.text import counted, si

_FAMILY = {1e7: "10m", 3e7: "30m", 1e8: "100m", 3e8: "300m", 1e9: "1b", 3e9: "3b", 7e9: "7b"}
# Below these, heads are half and a quarter as wide and not grouped: shapes come in finer steps.
_SMALL, _TINY = 5e6, 1e6
PARAMETERS = 1e7  # unless the user gives a number or a shape
SHAPE = {"model.num_layers", "model.d_model", "model.num_heads", "model.d_inner"}
TOLERANCE = 0.5  # how far, as a logarithm, the model may be from the wanted size
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
MOST_PASSES = 10  # over the corpus
FEWEST_STEPS = 100
HIGHEST_RATE = 3e-3
PAPER_RATE = 2.5e-4  # of all published models; layers that normalize their sum need a low one
EVALUATIONS, SAVES = 10, 20  # per run
# Of a run's FLOPs for evaluations before the last: few lanes take up to twice as long as FLOPs say.
EVALUATED = 0.05
_PARTS = ("positions", "norm", "norm_position", "feed_forward")  # unlike the paper's
# What every file has -> its comment.
_COMMENTS = {
    "name": "",
    "seed": "",
    "model": "vocab_size is the corpus'",
    "model.num_layers": "",
    "model.d_model": "",
    "model.num_heads": "",
    "model.num_key_heads": "heads of keys and values; 0: as many",
    "model.memory_length": "tokens remembered from earlier segments; 0: none",
    **{f"model.{name}": "" for name in (*_PARTS, "query_key_norm", "z_loss")},
    "data.path": "",
    "data.lanes": "rows of a batch; the number of ranks must divide it",
    "data.segment_length": "tokens of each lane in a step",
    "optim.steps": "more may be added when resuming",
    "optim.learning_rate": "tune it first: 'pretrain scale plan --rates'",
    "optim.betas": "",
    "optim.weight_decay": "",
    "optim.clip_norm": "",
    "optim.schedule.shape": "",
    "optim.schedule.warmup_steps": "",
    "optim.schedule.final_fraction": "of the learning rate, at the end",
    "engine.zero_stage": "2 and 3 save memory on many ranks",
    "engine.precision": "bf16 on GPUs",
    "checkpoint.interval": "steps",
    "evaluation.interval": "steps; 0: only at the end",
    "evaluation.max_tokens": "of the split, 0: all; the last one: at least 100,000",
}


@dataclass(frozen=True, kw_only=True)
class TrainingText:
    """What an experiment depends on in a corpus."""

    path: Path
    tokens: int
    longest_document: int
    vocab_size: int

    @classmethod
    def of_corpus(cls, corpus: Path) -> TrainingText:
        """Read them from the corpus in a directory or at a URL."""
        path = absolute(corpus)
        manifest = read_manifest(local_corpus_directory(path, CacheConfig()) / "train")
        return cls(
            path=path,
            tokens=manifest.tokens,
            longest_document=manifest.longest_whole,
            vocab_size=manifest.vocab_size,
        )


def check_new_file(file: Path) -> None:
    """Raise ConfigError unless a new experiment can have this file, and its name."""
    require_yaml_name(file)
    refuse_overwrite(file)
    require_name("the experiment's file name", file.stem)


def next_step(file: Path, run: RunConfig) -> str:
    """Say what the experiment of a new file trains, and how to start it."""
    tokens = run.optim.steps * run.tokens_per_step
    return (
        f"{file}: {amount(run_cost(run).parameters)} parameters, "
        f"{counted(run.optim.steps, 'step')} of {run.tokens_per_step:,} tokens, "
        f"{si(tokens)}tokens in all; next: launcher local {file} --ranks 2"
    )


def new_experiment(
    name: str,
    text: TrainingText,
    asked: float | None,
    paper: bool = False,
    steps: int = 0,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Return a run with about the parameters `asked`, by default with the shape in `overrides`, or
    PARAMETERS; ConfigError if no shape is near.

    `steps` replaces what parameters and text ask for, and `overrides` hold in any case.
    """
    given = {override.partition("=")[0] for override in overrides}
    parameters = asked or PARAMETERS
    if asked is None and given & SHAPE:
        usual = _overridden(_base_of(PARAMETERS, text.vocab_size), overrides)
        parameters = run_cost(usual).parameters
    base = _base_of(parameters, text.vocab_size)
    if paper:
        base = _with_parts_of_the_paper(base)
    base = _overridden(base, overrides)
    run = Family(base=base, keep_layers="model.num_layers" in given).nearest(parameters)
    size = run_cost(run).parameters
    if asked is not None and abs(math.log(size / asked)) > TOLERANCE:
        raise ConfigError(
            f"--parameters={amount(asked)}: with a vocabulary of {text.vocab_size:,} tokens "
            f"the nearest model has {amount(size)}; ask for that many, or build the corpus with "
            "another vocab_size"
        )
    run = _overridden(run, overrides)
    size = run_cost(run).parameters
    lanes, segment = fitting_batch(base.data, text)
    wider = base.model.d_model / run.model.d_model
    highest = PAPER_RATE if paper else HIGHEST_RATE
    rate = min(highest, base.optim.learning_rate * math.sqrt(max(1.0, wider)))
    run = replace(
        run,
        name=name,
        model=replace(run.model, d_head=0, memory_length=min(base.model.longest_memory, segment)),
        data=replace(base.data, path=text.path, lanes=lanes, segment_length=segment),
        optim=replace(run.optim, learning_rate=float(f"{rate:.2g}")),
        engine=EngineConfig(),
    )
    tokens = min(TOKENS_PER_PARAMETER * size, MOST_PASSES * text.tokens)
    steps = steps or max(FEWEST_STEPS, round(tokens / (lanes * segment)))
    run = with_steps(run, steps)
    run = replace(
        run,
        checkpoint=replace(run.checkpoint, interval=max(1, steps // SAVES)),
        evaluation=EvaluationConfig(interval=0),
    )
    time = run_time(run, 1, 1.0)  # with the last evaluation alone
    if time.evaluation is not None:
        affordable = int(EVALUATED * time.training / max(time.evaluation, 1.0))
        if count := min(EVALUATIONS - 1, affordable, steps):
            run = replace(run, evaluation=EvaluationConfig(interval=max(1, steps // (count + 1))))
    return _overridden(run, overrides)


def _overridden(run: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the run with these settings; a pattern of layers is repeated as often as fits."""
    tree, given = to_tree(run), parse_overrides(overrides)
    merge(tree, given)
    if (kinds := tree["model"]["layer_kinds"]) and "num_layers" not in given["model"]:
        tree["model"]["num_layers"] = len(kinds) * max(1, round(run.model.num_layers / len(kinds)))
    own, width = given.get("model", {}), tree["model"]["d_model"]
    if "d_model" in own and not own.keys() & {"num_heads", "d_head"}:  # heads about as wide
        most = max(1, width // run.model.head_width)
        even = (heads for heads in range(most, 1, -1) if width % (2 * heads) == 0)
        tree["model"]["num_heads"] = next(even, 1)
    heads = tree["model"]["num_heads"]
    is_new = isinstance(heads, int) and 0 < heads <= MOST_HEADS and heads != run.model.num_heads
    if is_new and "num_key_heads" not in own:
        tree["model"]["num_key_heads"] = grouped_key_heads(run.model, heads)
    return parse_config(RunConfig, tree, "command line")


def _base_of(parameters: float, vocab_size: int) -> RunConfig:
    """Return the shipped experiment of the nearest size, with this vocabulary."""
    size = min(_FAMILY, key=lambda size: abs(math.log(size / parameters)))
    base = load_config(RunConfig, SHIPPED / "models" / f"xl_modern_{_FAMILY[size]}.yaml")
    finer = 4 if parameters < _TINY else 2 if parameters < _SMALL else 1
    model = replace(
        base.model,
        vocab_size=vocab_size,
        num_heads=finer * base.model.num_heads,
        num_key_heads=base.model.num_key_heads if finer == 1 else 0,
    )
    return replace(base, model=model)


def _with_parts_of_the_paper(base: RunConfig) -> RunConfig:
    """Return the run with the paper's parts, which are the defaults of the settings."""
    paper = ModelConfig()
    names = (*_PARTS, "query_key_norm", "num_key_heads", "z_loss")
    parts: dict[str, Any] = {name: getattr(paper, name) for name in names}
    return replace(base, model=replace(base.model, **parts))


def fitting_batch(data: DataConfig, text: TrainingText) -> tuple[int, int]:
    """Return lanes and segment length, powers of two up to these that the corpus can fill."""
    possible = comfortable_lanes(text.tokens, text.longest_document)
    lanes = power_of_two(min(data.lanes, possible))
    return lanes, power_of_two(min(data.segment_length, text.tokens // lanes))


def experiment_text(
    run: RunConfig, file: Path, text: TrainingText, overrides: Sequence[str] = ()
) -> str:
    """Return the run as a commented experiment file, which `load_config` reads back."""
    comments, paper = dict(_COMMENTS), ModelConfig()  # whose defaults are the paper's
    if run.model.d_inner:
        comments["model.d_inner"] = ""
    for name in _PARTS:
        if getattr(run.model, name) != (of_paper := getattr(paper, name)):
            comments[f"model.{name}"] = f"the paper's: {of_paper}"
    trial, tokens = max(1, run.optim.steps // 10), run.optim.steps * run.tokens_per_step
    parameters = amount(run_cost(run).parameters)
    return f"""\
# {parameters} parameters on {text.tokens:,} tokens, written by 'pretrain new'.
# {amount(tokens)} tokens are read, {run.tokens_per_step:,} in a step.
# What each setting means, and all others: docs/settings.md, or 'pretrain settings optim'.
#   pretrain describe {file}                       memory, FLOPs and time before it starts
#   launcher local {file} --ranks 2                train on this machine; the same resumes
#   launcher submit {file} --cluster CLUSTER.yaml  on Slurm; 'launcher new-cluster' writes one
# A shorter run: optim.steps={trial} optim.schedule.warmup_steps={max(1, trial // 20)}
# 'new' and 'new --paper' start from different rates; for a fair comparison tune both.
""" + commented_settings(run, comments, overrides)


def commented_settings(
    run: RunConfig, comments: Mapping[str, str], overrides: Sequence[str] = ()
) -> str:
    """Return the run's settings that have a comment, which may be "", and overridden ones, as YAML.

    A section's comment is for its first line, and does not ask for all of its settings.
    """
    tree, shown = to_tree(run), {}
    names = [name for name in comments if name not in tree or not isinstance(tree[name], dict)]
    for name in (*names, *(override.partition("=")[0] for override in overrides)):
        *sections, key = name.split(".")
        value, into = tree, shown
        for section in sections:
            value, into = value[section], into.setdefault(section, {})
        into[key] = value[key]
    return "\n".join([*_commented_lines(shown, comments), ""])


def _commented_lines(
    tree: Mapping[str, Any], comments: Mapping[str, str], prefix: str = "", indent: str = ""
) -> Iterator[str]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        comment = f"  # {comments[name]}" if comments.get(name) else ""
        if value and isinstance(value, Mapping):
            yield f"{indent}{key}:{comment}"
            yield from _commented_lines(value, comments, f"{name}.", f"{indent}  ")
            continue
        shown = json_text(value, ensure_ascii=False)
        if isinstance(value, str) and not any(map(str.isspace, value)):
            shown = dump_yaml(value).splitlines()[0]  # without quotes, where it needs none
        yield f"{indent}{key}: {shown}{comment}"
