"""The action predict of `pretrain scale`."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from data_pipeline.config_loader import load_config, to_tree
from data_pipeline.errors import ConfigError
from data_pipeline.files import write_text
from data_pipeline.yaml_files import dump_yaml
from pretrain.config import RunConfig
from pretrain.scaling.costs import cost_of
from pretrain.scaling.fit import Fit
from pretrain.scaling.fit_command import fit_of
from pretrain.scaling.plan import with_vocabulary
from pretrain.scaling.predict import (
    BAND,
    Forecast,
    doubts,
    forecast,
    loss_of_run,
    near_optimal_band,
    preferred,
    refuse_wild,
    run_doubts,
)
from pretrain.scaling.recipe import with_budget
from pretrain.scaling.shapes import nearest_shape, refuse_far_shape
from pretrain.scaling.summary import aligned, forecast_table, number, shown, warning_lines


def run(arguments: argparse.Namespace) -> int:
    """Print the forecasts, and write the experiment file when asked to."""
    target = {"flops": arguments.flops, "tokens": arguments.tokens, "parameters": arguments.params}
    given = {name: value for name, value in target.items() if value}
    is_wrong = any(not 0 <= value < math.inf for value in target.values())
    if is_wrong or not given or ("flops" in given and len(given) > 1):
        raise ConfigError(
            "give a positive --flops, --tokens or --params; --tokens and --params together ask for one run's loss"
        )
    if arguments.write and not arguments.experiment:
        raise ConfigError("--write needs --experiment, the experiment whose family of shapes to choose from")
    fit = fit_of(arguments)
    if len(given) == 2:
        return _single_run(fit, arguments)
    approach = preferred(fit, arguments.approach)
    chosen = forecast(approach, fit.flops_law, **given)
    reasons = doubts(fit, chosen.flops.value, approach)
    if not arguments.force:
        refuse_wild(reasons)
    forecasts = [forecast(item, fit.flops_law, **given) for item in fit.approaches]
    print("\n".join(aligned(*forecast_table(forecasts))))
    if band := near_optimal_band(fit, chosen.flops.value):
        low, high = (number(size, prefix=True) for size in band)
        print(f"near-optimal at {chosen.flops.value:.3g} FLOPs: N from {low} to {high} loses at most {BAND:.0%}")
    print("\n".join([f"doubt: {doubt}" for doubt in reasons] + warning_lines(fit)))
    if arguments.experiment:
        _nearest(chosen, arguments)
    return 0


def _single_run(fit: Fit, arguments: argparse.Namespace) -> int:
    flops = fit.flops_law.scale * arguments.params**fit.flops_law.power * arguments.tokens
    reasons = run_doubts(fit, arguments.params, arguments.tokens)
    if not arguments.force:
        refuse_wild(reasons)
    loss = loss_of_run(fit, arguments.params, arguments.tokens)
    size, tokens = (number(value, prefix=True) for value in (arguments.params, arguments.tokens))
    print(f"loss of N = {size} over D = {tokens} ({flops:.3g} FLOPs): {shown(loss, 5)}")
    for doubt in reasons:
        print(f"doubt: {doubt}")
    return 0


def _nearest(chosen: Forecast, arguments: argparse.Namespace) -> None:
    base = with_vocabulary(load_config(RunConfig, arguments.experiment))
    shaped = nearest_shape(base, chosen.parameters.value, arguments.keep_layers)
    refuse_far_shape(shaped, chosen.parameters.value)
    run = with_budget(shaped, chosen.flops.value, arguments.rule, arguments.lanes_multiple)
    run = replace(run, name=f"{base.name}-c{chosen.flops.value:.3g}".replace("+", ""))
    cost, model = cost_of(run), run.model
    size, tokens = (number(value, prefix=True) for value in (cost.parameters, cost.tokens))
    print(
        f"nearest legal run: {model.num_layers} layers, d_model {model.d_model}, {model.num_heads} heads of "
        f"{model.head_width}: N {size}, D {tokens}, {cost.flops:.4g} FLOPs; {run.optim.steps} steps of "
        f"{cost.tokens_per_step} tokens, learning rate {run.optim.learning_rate:.3g}"
    )
    if arguments.write:
        header = (
            f"# The optimum at {chosen.flops.value:.4g} FLOPs by approach {chosen.approach}: "
            f"loss {shown(chosen.loss, 4)}\n"
            f"# Written by 'pretrain scale predict' from {arguments.runs.name}; rate and batch: {arguments.rule}\n"
        )
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.write, header + dump_yaml(to_tree(run)))
        print(f"written: {arguments.write}")
