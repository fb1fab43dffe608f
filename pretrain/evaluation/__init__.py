"""Loss by memory length, effective context length, the sliding-window baseline, sampling.

Imported by commands, demo and `run.py`; uses weights, engines and model.
"""
