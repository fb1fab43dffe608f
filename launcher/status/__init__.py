"""What state a run is in, inferred from its directory and from Slurm's queue.

Imported by commands and sweep; reads only.
"""
