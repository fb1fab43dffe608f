"""`scale plan --simulate`: widths that fits of drawn losses have, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pretrain.commands import scale
from pretrain.scaling.fit import estimate
from pretrain.scaling.law import fit_flops_law
from pretrain.scaling.simulation import ASSUMED
from pretrain.scaling.sweep_file import read_sweep
from pretrain.scaling.table import Points

EXPERIMENT = Path(__file__).parents[3] / "configs" / "experiments" / "demo.yaml"
BUDGETS, TARGET, NOISE = ("1e16", "1e17", "1e18"), 1e20, 0.01
DRAWS = 60
UNITS = {"M": 1e6, "G": 1e9, "T": 1e12}


def plan(path: Path, *flags: object) -> int:
    words = ["plan", EXPERIMENT, "model.vocab_size=1000", "--output", path, *flags]
    return scale.PROGRAM.main([str(word) for word in words])


def size(text: str) -> float:
    return float(text[:-1]) * UNITS[text[-1]]


def test_the_simulated_width_is_that_of_fits_to_losses_drawn_from_the_law(tmp_path, capsys):
    path = tmp_path / "sweep.yaml"
    flags = ("--budgets", *BUDGETS, "--no-checks", "--simulate", TARGET, "--noise", NOISE)
    assert plan(path, *flags) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    facts = [cell.facts for cell in read_sweep(path).cells]
    columns = {
        f"{name}_P": np.array([each[key] for each in facts])
        for name, key in (("tokens", "tokens"), ("flops", "flops"), ("budget", "budget"))
    }
    sizes_P = np.array([each["parameters"] for each in facts])
    flops_law = fit_flops_law(sizes_P, columns["tokens_P"], columns["flops_P"])
    rng, found = np.random.default_rng(5), {"parametric": [], "isoflop": []}
    for _ in range(DRAWS):
        noise_P = np.exp(NOISE * rng.standard_normal(len(facts)))
        points = Points(
            names=tuple(map(str, range(len(facts)))),
            parameters_P=sizes_P,
            loss_P=ASSUMED.loss(sizes_P, columns["tokens_P"]) * noise_P,
            progress_P=np.ones(len(facts)),
            holdout_P=np.zeros(len(facts), bool),
            **columns,
        )
        for key, law in estimate(points)[0].items():
            if key in found:
                best = law.line(flops_law).log_parameters(np.log(TARGET))
                found[key].append(float(best))
    for key, title in (("parametric", "3"), ("isoflop", "2")):
        (row,) = (line for line in lines if line[:3] == ["as", "it", "is"] and line[4] == title)
        low, high = (size(text.strip("[],")) for text in row[7:9])
        spread = np.log(high / low)
        # 60 draws tell a standard deviation to 9%, the ends of 95% to a bit less.
        assert spread == pytest.approx(4 * np.std(found[key]), rel=0.4)
        middle = np.exp(np.median(found[key]))
        assert size(row[6]) == pytest.approx(middle, rel=0.3)


@pytest.mark.parametrize(
    "flags",
    [
        ("--rates", "1e-3", "--simulate", "1e20"),
        ("--budgets", *BUDGETS, "--simulate", "1e20", "--noise", "0"),
        ("--budgets", *BUDGETS, "--simulate", "-1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(flags, tmp_path, capsys):
    path = tmp_path / "sweep.yaml"
    assert plan(path, *flags) == 2
    error = capsys.readouterr().err
    assert "--simulate" in error
    assert error.count("\n") == 1
    assert not path.exists()
