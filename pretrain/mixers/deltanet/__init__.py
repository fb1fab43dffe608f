"""Gated DeltaNet: linear attention with a state of fixed size."""
