"""Forward, backward and update: plain torch, and DeepSpeed ZeRO 0 to 3.

Imported by `train.py`, `run.py`, checkpoint and metrics; uses model, optim, distributed.
"""
