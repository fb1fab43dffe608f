"""What commands say that read a run's weights."""

from __future__ import annotations

# Flags of other programs that choose a checkpoint -> what to do.
LATEST_CHECKPOINT_HINTS = dict.fromkeys(
    ("--step", "--checkpoint", "--ckpt"), "the latest valid checkpoint is used; leave it out"
)
