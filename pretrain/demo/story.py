"""The order of the demo's stages, and each result in a line."""

from __future__ import annotations

import sys
from typing import Any

from data_pipeline.config_loader import to_tree
from pretrain.demo import stages
from pretrain.demo.page import write_report
from pretrain.demo.settings import RANKS, Settings
from pretrain.demo.stages import Result, Stage
from pretrain.terminal.text import duration


def story() -> tuple[Stage, ...]:
    """All stages in order."""
    return (
        Stage(
            "corpus",
            "Collect text",
            stages.write_corpus,
            lambda result: (
                f"{result['documents']:,} documents, {result['bytes'] / 1e6:.1f} MB from {result['source']}"
            ),
            inputs=_text_inputs,
        ),
        Stage(
            "tokenizer",
            "Train a SentencePiece tokenizer",
            stages.train_tokenizer,
            lambda result: f"{result['vocab_size']:,} tokens, {result['kind']}",
            inputs=lambda settings: [stages.VOCAB_SIZE, stages.VALIDATION_FRACTION],
            leaves=lambda settings: (settings.tokenizer,),
        ),
        Stage(
            "shards",
            "Encode the text and write MDS shards",
            stages.write_shards,
            _shards_line,
            inputs=lambda settings: stages.SHARD_BYTES,
            leaves=lambda settings: (settings.data,),
            can_go_on=True,
        ),
        Stage(
            "undisturbed",
            f"Train with DeepSpeed ZeRO on {RANKS} ranks, undisturbed",
            stages.train_undisturbed,
            _trained_line,
            inputs=_run_inputs,
            # Begun anew when the demo was stopped: this run must never have been interrupted.
            leaves=lambda settings: (settings.undisturbed.path,),
        ),
        Stage(
            "kill",
            f"Train the same again and SIGKILL all {RANKS} ranks in the middle",
            stages.train_and_kill,
            _killed_line,
            leaves=lambda settings: (settings.killed.path,),
        ),
        Stage(
            "resume",
            "Resume it from its last checkpoint and compare every bit",
            stages.resume_and_compare,
            _resumed_line,
            can_go_on=True,
        ),
        Stage(
            "memory",
            "Evaluate with memories of several lengths",
            stages.evaluate_memory,
            lambda result: f"memory lowers the loss by {memory_gain(result):.2f} nats per token",
            inputs=lambda settings: stages.EVALUATION_TOKENS,
        ),
        Stage(
            "sample",
            "Let it write",
            stages.sample,
            lambda result: f"{len(result['text']):,} characters sampled",
            inputs=lambda settings: [stages.SAMPLE_TOKENS, stages.PROMPT],
        ),
        Stage(
            "report",
            "Write the report",
            write_report,
            lambda result: result["path"],
            is_always_done=True,
        ),
    )


def memory_gain(result: Result) -> float:
    """How much lower the loss is with the training's memory than with none, in nats per token."""
    by_times = {row["times"]: row["loss"] for row in result["rows"]}
    return by_times[0] - by_times[1]


def _text_inputs(settings: Settings) -> Any:
    if settings.corpus is None:
        return sys.version
    files = sorted(path for path in settings.corpus.rglob("*") if path.is_file())
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _run_inputs(settings: Settings) -> Any:
    tree = to_tree(settings.run)
    del tree["data"]["path"]  # the directory may be moved
    return tree


def _shards_line(result: Result) -> str:
    return "; ".join(
        f"{split}: {part['documents']:,} documents, {part['tokens'] / 1e6:.2f}M tokens in {part['shards']} shards"
        for split, part in result.items()
    )


def _trained_line(result: Result) -> str:
    return (
        f"loss {result['final_loss']:.3f} after {duration(result['seconds'])}, "
        f"{result['tokens_per_second']:,.0f} tokens/s, MFU {result['mfu']:.0%}, "
        f"{result['used_memory_gib']:.2f} GiB per rank"
    )


def _killed_line(result: Result) -> str:
    return (
        f"killed after step {result['killed_after']}; the newest checkpoint is step {result['checkpoint']}, "
        f"so {len(result['lost'])} steps are lost and will be made again"
    )


def _resumed_line(result: Result) -> str:
    if result["problems"]:
        return "DIFFERENT:\n" + "\n".join(result["problems"])
    return (
        f"identical: every loss and the whole final state (weights, moments, memories, cursors, random numbers), "
        f"the {result['lost_steps']} lost steps included"
    )
