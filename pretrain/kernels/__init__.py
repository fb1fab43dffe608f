"""Relative attention as tiles on the CPU and as Triton kernels on a GPU."""
