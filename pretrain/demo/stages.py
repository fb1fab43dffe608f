"""The demo's stages: what each does and says. Later stages read nothing of it but its JSON-able result."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.config import CorpusConfig, TokenizerConfig
from pretrain.demo import texts, training
from pretrain.demo.screen import Screen
from pretrain.demo.settings import RANKS, Settings

VOCAB_SIZE = 4096
VALIDATION_FRACTION = 0.06
SHARD_BYTES = 512 << 10
EVALUATION_TOKENS = 60_000
SAMPLE_TOKENS = 260
PROMPT = '"""Read settings from a file."""\n\nimport os\n\n\nclass Settings:\n'

Result = dict[str, Any]
Results = dict[str, Result]


@dataclass(frozen=True)
class Stage:
    """One step of the story. `leaves` are removed before it begins, unless it may go on from where it was stopped."""

    name: str
    title: str
    run: Callable[[Screen, Settings, Results], Result]
    summary: Callable[[Result], str]
    inputs: Callable[[Settings], Any] = lambda settings: None
    leaves: Callable[[Settings], tuple[Path, ...]] = lambda settings: ()
    can_go_on: bool = False
    is_always_done: bool = False


def write_corpus(screen: Screen, settings: Settings, results: Results) -> Result:
    if settings.corpus is None:
        documents, where = texts.standard_library(), "this Python's standard library"
    else:
        documents = texts.folder_of_text(settings.corpus, settings.directory)
        where = f"--corpus {settings.corpus}"
    written = texts.write_jsonl(settings.documents, documents)
    texts.refuse_too_little(written, where)
    return {**written, "source": where}


def train_tokenizer(screen: Screen, settings: Settings, results: Results) -> Result:
    from data_pipeline.builder.sources import list_sources
    from data_pipeline.builder.train_tokenizer import prepare_tokenizer

    config = corpus_config(settings)
    tokenizer = prepare_tokenizer(settings.tokenizer, list_sources(config.input, config), config)
    return {"vocab_size": tokenizer.vocab_size, "kind": tokenizer.kind}


def write_shards(screen: Screen, settings: Settings, results: Results) -> Result:
    from data_pipeline.builder.build_corpus import build_corpus

    with screen.progress("encoding", None) as meter:
        built = build_corpus(
            corpus_config(settings, settings.tokenizer), lambda what: meter.advance(1, str(what))
        )
    return {
        split: {
            "documents": manifest.documents,
            "tokens": manifest.tokens,
            "shards": len(manifest.shards),
            "bytes_per_token": manifest.text_bytes / manifest.tokens,
        }
        for split, manifest in built.manifests.items()
    }


def train_undisturbed(screen: Screen, settings: Settings, results: Results) -> Result:
    start = training.train(screen, settings, settings.undisturbed, attempt=0)
    return _trained(settings, settings.undisturbed, start)


def train_and_kill(screen: Screen, settings: Settings, results: Results) -> Result:
    start = training.train(
        screen, settings, settings.killed, attempt=0, kill_after=settings.kill_after
    )
    checkpoint = training.newest_step(settings.killed)
    return {
        "killed_after": start.last_step,
        "checkpoint": checkpoint,
        # Resuming cuts these from the run's measurements; they are kept here to be compared with what is made again.
        "lost": [list(each) for each in training.losses(settings.killed) if each[0] > checkpoint],
        "seconds": start.seconds,
    }


def resume_and_compare(screen: Screen, settings: Settings, results: Results) -> Result:
    from pretrain.checkpoint import directory as checkpoint_files
    from pretrain.checkpoint import marker
    from pretrain.commands.same_run import differing_losses, differing_state

    start = training.train(screen, settings, settings.killed, attempt=1)
    undisturbed, killed = settings.undisturbed, settings.killed
    ends = [
        marker.verify(checkpoint_files.step_directory(run_dir.checkpoints, settings.steps))
        for run_dir in (undisturbed, killed)
    ]
    problems = differing_losses(undisturbed, killed) + differing_state(*ends)
    again = dict(training.losses(killed))
    lost = results["kill"]["lost"]
    problems += [
        f"step {step}: {loss!r} before the kill, {again[step]!r} after"
        for step, loss in lost
        if again[step] != loss
    ]
    return {**_trained(settings, killed, start), "problems": problems[:20], "lost_steps": len(lost)}


def evaluate_memory(screen: Screen, settings: Settings, results: Results) -> Result:
    import torch

    from data_pipeline.corpora.corpus import Corpus
    from pretrain.distributed.world import destroy_process_group, init_world
    from pretrain.evaluation.evaluate import TrainedScorer, evaluate
    from pretrain.weights.trained_model import load_trained

    corpus = Corpus.open(settings.data / "validation")
    tokens = min(EVALUATION_TOKENS, corpus.num_tokens)
    run = settings.run
    torch.set_num_threads(
        1
    )  # more threads wait for each other as soon as the machine has other work
    world = init_world()
    rows = []
    try:
        scorer = TrainedScorer(
            load_trained(settings.killed.path, world.device, say=screen.say), world
        )
        for times in (0, 1, 2, 4):
            memory_length = times * run.model.memory_length
            with screen.progress(f"memory {memory_length:>4}", tokens) as meter:
                result = evaluate(
                    scorer,
                    corpus,
                    memory_length=memory_length,
                    segment_length=run.data.segment_length,
                    num_lanes=run.evaluation.lanes,
                    max_tokens=tokens,
                    advance=meter.advance,
                )
            screen.say(
                f"memory {memory_length:>4} tokens ({times}x): loss {result.loss:.4f}  "
                f"perplexity {result.perplexity:7.2f}  {result.bits_per_byte:.3f} bits/byte"
            )
            rows.append({"times": times, **vars(result)})
    finally:
        destroy_process_group()
    return {"rows": rows}


def sample(screen: Screen, settings: Settings, results: Results) -> Result:
    import torch

    from pretrain.evaluation.sampling import Sampling, TextStream, generate, prompt_tokens
    from pretrain.weights.trained_model import load_tokenizer, load_trained

    trained = load_trained(settings.killed.path, torch.device("cpu"), say=screen.say)
    tokenizer = load_tokenizer(trained, settings.data)
    prompt = PROMPT if settings.corpus is None else ""
    stream, text = TextStream(tokenizer), ""
    with screen.progress("writing", SAMPLE_TOKENS) as meter:
        tokens = generate(
            trained.module,
            prompt_tokens(tokenizer, prompt),
            sampling=Sampling(temperature=0.7, top_p=0.9),
            num_tokens=SAMPLE_TOKENS,
            end_id=tokenizer.end_id,
            seed=settings.run.seed,
            segment_length=settings.run.data.segment_length,
        )
        for tokens_B in tokens:
            text += stream.add(int(tokens_B[0]))
            meter.advance(1)
    text += stream.rest()
    screen.say(f"{prompt}{text}")
    return {"prompt": prompt, "text": text}


def corpus_config(settings: Settings, tokenizer: Path | None = None) -> CorpusConfig:
    """How the demo's text becomes shards: small ones, so that the lanes' order has something to permute."""
    return CorpusConfig(
        input=(settings.documents,),
        output=settings.data,
        validation_fraction=VALIDATION_FRACTION,
        shard_bytes=SHARD_BYTES,
        threads=RANKS,
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=VOCAB_SIZE, path=tokenizer),
    )


def remove(paths: tuple[Path, ...]) -> None:
    """Make place for a stage to begin anew."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _trained(settings: Settings, run_dir: training.RunDir, start: training.Start) -> Result:
    losses = training.losses(run_dir)
    tail = [loss for _, loss in losses[-max(1, len(losses) // 20) :]]
    return {
        "seconds": start.seconds,
        "seconds_to_first_step": start.seconds_to_first_step,
        "final_loss": math.fsum(tail) / len(tail),
        **training.speed(run_dir),
    }
