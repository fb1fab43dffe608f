"""Optimizers, schedules, the loss scale, parameter fragments, per-layer norms."""
