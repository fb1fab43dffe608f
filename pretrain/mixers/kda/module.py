"""Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, section 4): a delta rule by channel."""

import torch

from pretrain.mixers.deltanet.module import GatedDeltaNet


class KimiDeltaAttention(GatedDeltaNet):
    """Gated DeltaNet with a decay for each channel of a head's keys, and sigmoid as output gate.

    W_a and W_g are whole matrices; the paper's are products of two narrow ones.
    """

    kind = "kda"
    by_channel = True
    activate_gate = staticmethod(torch.sigmoid)
