"""The probes of `pretrain scale variants measure`. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from data_pipeline.corpora.corpus import Corpus
from data_pipeline.files import read_json
from pretrain.commands.probe_outputs import probe_with_status, write_probes
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.evaluation.evaluate import TrainedScorer
from pretrain.evaluation.probes.probe_settings import ProbeSettings
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.variants.probed import PROBES
from pretrain.weights.trained_model import load_trained


def probe_runs(runs: Sequence[Path], trials: int, longest_distance: int) -> None:
    """Write probes.html and probes.json of every run that does not have the same already."""
    world = init_world()
    try:
        for path in runs:
            config = RunDir.open(path).config
            settings = ProbeSettings(
                names=("needle", "position"),
                memory_length=config.model.longest_memory,
                segment_length=config.data.segment_length,
                lanes=config.evaluation.lanes,
                max_tokens=config.evaluation.max_tokens,
                trials=trials,
                longest_distance=longest_distance,
                seed=0,
            )
            if _is_probed(path / PROBES, config.optim.steps, settings):
                continue
            trained = load_trained(path, world.device)
            corpus = Corpus.open(trained.corpus_directory() / "validation")
            results = probe_with_status(TrainedScorer(trained, world), path, corpus, settings)
            found = write_probes(path, path, trained.step, results)["summary"]
            print(f"{path.name}: needle {found['needle_accuracy']:.1%}", flush=True)
    finally:
        destroy_process_group()


def _is_probed(path: Path, step: int, settings: ProbeSettings) -> bool:
    """Whether the file has these probes of the run after this step."""
    try:
        found = read_json(path)
        wanted = asdict(settings) | {"names": list(settings.names)}
        return found["step"] == step and wanted.items() <= found["settings"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
