"""Starts, watches, restarts and resumes runs, on this machine and on Slurm.

The top package; torch-free, since it runs on login nodes.
"""
