"""The compute-optimal memory: a law over size, tokens and context, on runs of a known one."""

import math
import re
from functools import cache
from itertools import product

import numpy as np
import pytest

from foundation.errors import DataError
from pretrain.commands import scale
from pretrain.scaling.collect import Row, write_rows
from pretrain.scaling.memory_law import best_memory, fit_memory_law, flops_per_token, trained_runs

SEGMENT = 64
MEMORIES = (0, 64, 128, 256, 512)
SIZE = 1_000_000


def true_loss(size: float, tokens: float, memory: int) -> float:
    return 1.5 + 20 / size**0.3 + 60 / tokens**0.3 + 2 * mean_of_powers(memory, 0.4)


@cache
def mean_of_powers(memory: int, power: float) -> float:
    return sum(key**-power for key in range(memory + 1, memory + SEGMENT + 1)) / SEGMENT


def true_cost(size: float, memory: float) -> float:
    return 6 * size * (1 + memory / 400)


def rows_of(sizes=(SIZE,), noise=0.0, seed=0, **changes) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for size, tokens, memory in product(sizes, (10**7, 3 * 10**7, 10**8), MEMORIES):
        ended = {"loss": true_loss(size, tokens, memory) * (1 + noise * rng.standard_normal())}
        ended |= {
            "N": size,
            "D": tokens,
            "C": tokens * true_cost(size, memory),
            "varies": "lengths",
        }
        lengths = {"segment_length": SEGMENT, "memory_length": memory}
        rows.append(Row(name=f"n{size}-d{tokens}-m{memory}", **lengths, **{**ended, **changes}))
    return rows


def true_best(flops: float, sizes=(SIZE,)) -> int:
    losses = {
        memory: min(true_loss(size, flops / true_cost(size, memory), memory) for size in sizes)
        for memory in range(1025)
    }
    return min(losses, key=losses.__getitem__)


@pytest.mark.parametrize("flops", [1e14, 6e14])
def test_without_noise_the_best_memory_of_a_budget_is_found(flops):
    runs = trained_runs(rows_of())
    fit = fit_memory_law(runs)
    predicted_P = fit.law.loss(*runs.values)
    assert predicted_P == pytest.approx(runs.loss_P, rel=1e-4)
    found = best_memory(fit, flops)
    assert found.memory.value == pytest.approx(true_best(flops), rel=0.1)
    tokens = flops / true_cost(SIZE, found.memory.value)
    assert found.tokens == pytest.approx(tokens, rel=1e-6)
    assert found.without > found.loss.value


def test_a_larger_budget_pays_for_a_longer_memory_and_several_sizes_are_chosen_from():
    sizes = (250_000, 1_000_000, 4_000_000)
    runs = trained_runs(rows_of(sizes))
    fit = fit_memory_law(runs)
    small, large = (best_memory(fit, flops) for flops in (1e14, 1e15))
    assert small.memory.value < large.memory.value
    assert small.parameters < large.parameters
    fine = np.geomspace(125_000, 8_000_000, 200)
    assert large.memory.value == pytest.approx(true_best(1e15, fine), rel=0.15)
    exact = [[true_cost(size, memory) for memory in (0, 300)] for size in (250_000, 2_000_000)]
    found = flops_per_token(runs, np.array([250_000, 2_000_000]), np.array([0, 300]))
    assert found == pytest.approx(np.array(exact), rel=1e-6)


def test_the_interval_covers_the_best_memory_in_most_sweeps():
    flops, covered, widths = 3e14, 0, []
    for seed in range(12):
        runs = trained_runs(rows_of(noise=0.005, seed=seed))
        fit = fit_memory_law(runs)
        found = best_memory(fit, flops)
        covered += found.memory.low <= true_best(flops) <= found.memory.high
        widths.append(found.memory.high - found.memory.low)
    assert covered >= 10
    assert max(widths) > 0


def test_runs_that_determine_no_law_are_refused():
    few = [row for row in rows_of() if row.memory_length in (0, 64)]
    with pytest.raises(DataError, match=r" 6 .* 2 memory lengths, .* 7"):
        trained_runs(few)
    with pytest.raises(DataError, match=r"2 sizes; .* 3: "):
        trained_runs(rows_of((10**6, 4 * 10**6)))


def test_runs_that_differ_in_their_seed_alone_count_as_one_with_their_mean():
    once, twice = (
        trained_runs(rows_of()),
        trained_runs(rows_of(noise=0.01, seed=1) + rows_of(noise=0.01, seed=2)),
    )
    both = [[row.loss for row in rows_of(noise=0.01, seed=seed)] for seed in (1, 2)]
    assert twice.loss_P == pytest.approx(np.mean(both, axis=0))
    assert (twice.tokens_P == once.tokens_P).all()
    few = [
        row
        for row in rows_of()
        if row.memory_length <= 64 or (row.memory_length == 128 and row.D == 10**7)
    ][1:]
    with pytest.raises(DataError, match=r" 6 runs .* 7 "):
        trained_runs(few + few)


def test_the_command_reads_tables_and_answers_for_each_budget(tmp_path, capsys):
    paths = []
    for tokens in (10**7, 3 * 10**7, 10**8):
        paths.append(tmp_path / f"{tokens}.csv")
        rows = [row for row in rows_of(noise=0.002) if tokens == row.D]
        unused = [row for row in rows_of(excluded="diverged", loss=9.0) if tokens == row.D]
        write_rows(paths[-1], rows + unused)
    words = [str(path) for path in paths]
    assert scale.PROGRAM.main(["memory", *words, "--flops", "1e14", "6e14"]) == 0
    said = capsys.readouterr().out
    law = r"<k\^-0\.\d+>, a mean over tokens with k = memory \+ 1 to memory \+ 64 keys\n"
    assert re.search(rf"^15 .* 64: loss = .* {law}.* 0\.", said)
    found = re.findall(r"^([16]\.00e\+14) +(\d+) \[(\d+), (\d+)\]", said, re.M)
    assert len(found) == 2
    for flops, value, low, high in found:
        assert int(low) <= int(value) <= int(high)
        assert math.isclose(int(value), true_best(float(flops)), rel_tol=0.6)
    assert scale.PROGRAM.main(["memory", *words, "--flops", "1e18"]) == 2
    assert "10 times outside" in capsys.readouterr().err
    (empty := tmp_path / "empty.csv").touch()
    assert scale.PROGRAM.main(["memory", str(empty)]) == 2
    assert "empty.csv contains no runs" in capsys.readouterr().err
