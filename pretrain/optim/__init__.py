"""Optimizers, schedules, the loss scale, parameter fragments, per-layer norms.

Imported by engines and checkpoint; uses config and distributed.
"""
