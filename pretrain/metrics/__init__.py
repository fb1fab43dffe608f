"""What is measured while training, and the files it is written to.

Imported by `train.py` and `run.py`; uses engines, rundir, distributed.
"""
