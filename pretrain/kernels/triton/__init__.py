"""Fused relative attention for GPUs; triton is imported nowhere else.

Imported by `model`; uses nothing of `pretrain`.
"""
