"""Loss by memory length, effective context length, the sliding-window baseline, sampling.

Imported by commands and `run.py`; uses weights, engines and model.
"""
