"""The facts of Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692). Torch-free."""

from dataclasses import dataclass

from pretrain.mixers.deltanet.facts import DeltaNetSettings, GatedDeltaNetFacts


@dataclass(frozen=True, kw_only=True)
class KimiDeltaSettings(DeltaNetSettings):
    """The settings of Kimi Delta Attention, `model.mixers.kda`; values are as wide as keys."""

    expansion = 1


class KimiDeltaFacts(GatedDeltaNetFacts):
    """Every head has a state, which decays by channel of its keys."""

    title = "Kimi Delta Attention"
    module = "KimiDeltaAttention"
    settings = KimiDeltaSettings
    by_channel = True
