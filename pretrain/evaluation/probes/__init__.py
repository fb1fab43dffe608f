"""Probes of memory: recall by distance, loss by document position, attention by distance.

`probe_run.py` takes them of one model.
"""
