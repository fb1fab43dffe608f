"""Probes of memory: recall by distance, loss by document position, attention by distance.

`probe_run.py` runs them on one model.
"""
