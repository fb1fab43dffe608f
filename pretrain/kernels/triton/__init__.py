"""Fused relative attention for GPUs; triton is imported nowhere else."""
