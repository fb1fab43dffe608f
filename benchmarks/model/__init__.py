"""`python -m benchmarks model`: the model, its training step and its checkpoints, on the CPU.

Baselines are reference implementations in the original's way, kept in `tests/helpers`.
"""
