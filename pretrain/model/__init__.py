"""The Transformer-XL family in plain torch, with its memory.

Imported by engines, evaluation and weights; uses kernels and config.
"""
