"""The figures of `inspect` about how well domains are mixed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.cli import main
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpora.mixing import MOST_DOMAINS, DomainOfShard, domains_of, mixing_of


def shards_of(domains_D: np.ndarray, lengths_D: np.ndarray, per_shard: int):
    for start in range(0, len(domains_D), per_shard):
        found: dict[str, DomainOfShard] = {}
        for domain, length in zip(
            domains_D[start : start + per_shard], lengths_D[start : start + per_shard], strict=True
        ):
            found.setdefault(f"d{domain}", DomainOfShard()).add(int(length))
        yield found


def test_figures_of_sorted_and_of_shuffled_documents_are_those_of_theory():
    generator = np.random.default_rng(1)
    per_shard, shards = 50, 400
    domains_D = np.repeat([0, 1, 2, 2], per_shard * shards // 4)
    lengths_D = generator.integers(1, 1000, len(domains_D))
    mixing = mixing_of(shards_of(domains_D, lengths_D, per_shard))
    # Sorted, every shard is of one domain: only the ends of shards are by chance.
    shares = np.bincount(domains_D) / len(domains_D)
    by_chance = (shares**2).sum()
    assert mixing.same_domain == pytest.approx(1 - (1 - by_chance) / per_shard)
    assert mixing.same_domain_shuffled == pytest.approx(by_chance, rel=1e-3)
    # With equal lengths the factor would be the root of the documents in a shard; unequal ones
    # count by their squares: n * mean**2 + variance over the mean square.
    mean_square = (lengths_D**2.0).mean()
    factor = np.sqrt(((per_shard - 1) * lengths_D.mean() ** 2 + mean_square) / mean_square)
    for found in mixing.variations.values():
        assert found == pytest.approx(factor, rel=0.02)

    order = generator.permutation(len(domains_D))
    mixed = mixing_of(shards_of(domains_D[order], lengths_D[order], per_shard))
    deviation = np.sqrt(by_chance * (1 - by_chance) / len(domains_D))
    assert abs(mixed.same_domain - mixed.same_domain_shuffled) < 5 * deviation
    for found in mixed.variations.values():
        assert abs(found**2 - 1) < 5 * np.sqrt(2 / shards)


def test_sums_of_parts_add_up():
    generator = np.random.default_rng(2)
    domains_D, lengths_D = generator.integers(0, 3, 60), generator.integers(1, 9, 60)
    shards = list(shards_of(domains_D, lengths_D, 10))
    joined, whole = mixing_of(shards[:2]) + mixing_of(shards[2:]), mixing_of(shards)
    assert joined.variations == pytest.approx(whole.variations)
    assert joined.same_domain == pytest.approx(whole.same_domain)


def test_a_domain_is_what_differs_below_the_folder_of_all_files():
    assert domains_of(["a/web/1/x", "a/web/2/y", "a/books.txt"]) == ["web", "web", "books.txt"]
    assert domains_of(["x.txt"]) == ["x.txt"]
    assert domains_of(["", "/", ":"]) == ["", "", ":"]
    many = domains_of([f"{number:04d}.txt" for number in range(1000)])
    assert len(set(many)) == MOST_DOMAINS
    assert many == sorted(many)
    assert many[0] == "0000.txt to 0015.txt"


def folders_config(tmp_path, **settings) -> CorpusConfig:
    for domain in ("books", "code", "web"):
        for number in range(60):
            path = tmp_path / "in" / domain / f"{number:02d}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{domain} {number} " * (5 + number % 7))
    return CorpusConfig(
        input=(tmp_path / "in",),
        output=tmp_path / "out",
        threads=1,
        validation_fraction=0.1,
        shard_bytes=1500,
        tokenizer=TokenizerConfig(kind="bytes"),
        **settings,
    )


def mixing_line(capsys, corpus) -> str:
    assert main(["inspect", str(corpus), "--lanes=2"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  mixing"))
    return line


def test_inspect_shows_both_figures_also_of_corpora_whose_build_recorded_none(tmp_path, capsys):
    config = folders_config(tmp_path)
    build_corpus(config)
    line = mixing_line(capsys, config.output)
    assert "of the same shard 8" in line
    assert "of the same of 3 domains 8" in line
    assert "after a full shuffle); the share of a domain" in line
    recipe = config.output / "build.json"
    tree = json.loads(recipe.read_text())
    del tree["counts"]["mixing"]
    recipe.write_text(json.dumps(tree))
    assert mixing_line(capsys, config.output) == line, "ids name the folders"


def test_of_one_file_inspect_shows_what_the_shards_say(tmp_path, capsys):
    config = folders_config(tmp_path)
    text = "\n".join(json.dumps({"id": f"d{number}", "text": "a" * 99}) for number in range(99))
    (tmp_path / "one.jsonl").write_text(text)
    build_corpus(replace(config, input=(tmp_path / "one.jsonl",)))
    assert mixing_line(capsys, config.output).endswith("% of the time")
