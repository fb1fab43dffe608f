"""Rewinds after loss spikes, smaller micro-batches when out of memory, stop requests, faults.

Imported by `train.py`, `run.py` and commands; uses checkpoint, rundir and distributed.
"""
