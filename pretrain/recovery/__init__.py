"""Loss spikes and rewinds, stop requests, injected faults.

Imported by `train.py`, `run.py` and commands; uses checkpoint, rundir and distributed.
"""
