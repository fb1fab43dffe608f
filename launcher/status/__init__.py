"""The state of a run, inferred from its directory and from Slurm's queue.

Imported by commands and sweeps; reads only.
"""
