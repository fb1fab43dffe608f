"""The probes of one model, and their results as numbers and as a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError
from pretrain.config.model import ProbeName
from pretrain.evaluation.evaluate import TrainedScorer
from pretrain.evaluation.probes.attention_mass import AttentionMass, attention_mass
from pretrain.evaluation.probes.document_position import (
    Borders,
    PositionLoss,
    bin_names,
    loss_by_position,
    memory_borders,
)
from pretrain.evaluation.probes.recall import (
    Recall,
    RecallKind,
    distances_up_to,
    measure_recall,
    recall_distance,
    tokens_of_corpus,
    tokens_of_vocabulary,
)
from pretrain.model.adopted import AdoptedModel

RECALLS: tuple[RecallKind, ...] = ("needle", "copy")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What decides the results, besides model and corpus."""

    names: tuple[ProbeName, ...]
    memory_length: int
    segment_length: int
    lanes: int  # of the probe `position`
    max_tokens: int  # of the probe `position`; 0: the whole split
    trials: int  # at each distance
    longest_distance: int  # 0: twice what a token sees directly

    def needs_text(self) -> bool:
        """Return whether a probe reads a split; the others only take tokens from one."""
        return not {"position", "attention"}.isdisjoint(self.names)


@dataclass(frozen=True, kw_only=True)
class ProbeResults:
    """The results of the probes that were asked for."""

    step: int
    settings: ProbeSettings
    borders: Borders
    text: str  # where text and frequent tokens are from; "" for the vocabulary alone
    recalls: Mapping[RecallKind, Sequence[Recall]]
    position: tuple[PositionLoss, ...] = ()  # with memory and without
    attention: AttentionMass | None = None

    def values(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON."""
        measured = {name: list(map(asdict, results)) for name, results in self.recalls.items()}
        if self.position:
            measured["position"] = list(map(asdict, self.position))
        if self.attention is not None:
            measured["attention"] = asdict(self.attention)  # type: ignore[assignment]
        settings, borders = asdict(self.settings), asdict(self.borders)
        return {
            "step": self.step,
            "summary": self.summary(),
            "settings": {**settings, "text": self.text},
            "borders": borders,
            "probes": measured,
        }

    def summary(self) -> dict[str, float]:
        """Return one number or two of each probe, by the name of its column."""
        numbers: dict[str, float] = {}
        for name, recalls in self.recalls.items():
            numbers[f"{name}_distance"] = recall_distance(recalls)
            numbers[f"{name}_accuracy"] = fmean(each.accuracy for each in recalls)
        if len(self.position) == 2:
            with_memory, without = self.position
            numbers["position_gain"] = without.losses[-1] - with_memory.losses[-1]
        if self.attention is not None:
            numbers["attention_to_memory"] = mean_over_heads(self.attention.share("memory"))
            numbers["attention_entropy"] = mean_over_heads(self.attention.entropy)
        return numbers


def mean_over_heads(by_layer_and_head: list[list[float]]) -> float:
    """Return the mean over layers and heads."""
    return fmean(value for layer in by_layer_and_head for value in layer)


def run_probes(
    scorer: TrainedScorer,
    tokenizer: Tokenizer,
    corpus: Corpus | None,
    settings: ProbeSettings,
    say: Callable[[str], None] = lambda words: None,
) -> ProbeResults:
    """Run the probes of a model; some need a corpus (`needs_text`). `say` gets what runs now."""
    module, names = scorer.trained.module, settings.names
    assert corpus is not None or not settings.needs_text()
    if "attention" in names and isinstance(module, AdoptedModel):
        raise ConfigError("--probe attention is for models of this project; leave it out")
    if "attention" in names and not module.config.num_layers_with_rows:
        raise ConfigError("--probe attention: the model has no attention layers; leave it out")
    if "attention" in names and module.config.memory_tokens:
        raise ConfigError(
            "--probe attention: found a model with memory tokens, which are at no distance in the "
            "text; leave it out"
        )
    memory, segment = settings.memory_length, settings.segment_length
    borders = memory_borders(module.config, memory, segment)
    settings = replace(settings, longest_distance=settings.longest_distance or 2 * borders.direct)
    results = ProbeResults(
        step=scorer.trained.step,
        settings=settings,
        borders=borders,
        text=str(corpus.location) if corpus else "",
        recalls={},
    )
    if not set(RECALLS).isdisjoint(names):
        tokens = tokens_of_corpus(corpus) if corpus else tokens_of_vocabulary(tokenizer)
        shown = (borders.segment, borders.direct, borders.total)
        recalls: dict[RecallKind, list[Recall]] = {name: [] for name in RECALLS if name in names}
        for kind, by_distance in recalls.items():
            for distance in distances_up_to(settings.longest_distance, shown):
                say(f"{kind} after {distance:,} tokens")
                recall = measure_recall(
                    kind,
                    module,
                    tokens,
                    distance,
                    memory_length=memory,
                    segment_length=segment,
                    num_trials=settings.trials,
                )
                by_distance.append(recall)
        results = replace(results, recalls=recalls)
    if corpus is None:
        return results
    if "position" in names:
        say("loss by position")
        lengths = list(dict.fromkeys((memory, 0)))
        position = loss_by_position(
            scorer,
            corpus,
            lengths,
            segment_length=min(segment, corpus.num_tokens),
            num_lanes=settings.lanes,
            max_tokens=settings.max_tokens,
        )
        results = replace(results, position=tuple(position))
    if "attention" in names and not isinstance(module, AdoptedModel):
        say("attention by distance")
        attention = attention_mass(module, corpus, memory_length=memory, segment_length=segment)
        results = replace(results, attention=attention)
    return results


def probe_rows(results: ProbeResults) -> list[tuple[str, ...]]:
    """Return the rows of a table, heads first."""
    rows = [("probe", "at", "found", "95% interval", "compare with")]
    for name, recalls in results.recalls.items():
        for each in recalls:
            interval = f"{each.low:.1%} to {each.high:.1%}"
            cells = (f"{each.distance:,}", f"{each.accuracy:.1%}", interval)
            rows.append((name, *cells, f"chance {each.chance:.1%}"))
    if results.position:
        first, last = results.position[0], results.position[-1]
        names = bin_names(first.first_positions)
        for name, loss, margin, other in zip(
            names, first.losses, first.margins, last.losses, strict=True
        ):
            without = f"without memory {other:.4f}" if first is not last else "-"
            interval = "-" if margin is None else f"+- {margin:.4f}"
            rows.append(("position", name, f"loss {loss:.4f}", interval, without))
    if (attention := results.attention) is not None:
        shares = attention.share("memory")
        by_layer = zip(attention.layers, shares, attention.entropy, strict=True)
        for number, share, entropy in by_layer:
            words = f"entropy {fmean(entropy):.2f} of {attention.uniform_entropy:.2f} nats"
            layer, mass = f"layer {number}", f"{fmean(share):.1%} in memory"
            rows.append(("attention", layer, mass, "-", words))
    return rows
