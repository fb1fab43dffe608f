"""Relative attention in cache-sized tiles, with its own backward pass.

Imported by `model` and the Triton tests; uses nothing of `pretrain`.
"""
