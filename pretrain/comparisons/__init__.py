"""Comparisons of variants at equal training FLOPs, and pages of sweeps that fit no law."""
