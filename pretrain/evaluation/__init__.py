"""Loss by memory length, effective context length, probes, tasks, sampling.

Imported by commands and `run.py`; uses weights, engines and model.
"""
