"""Elastic checkpoints: fragments and lane memories, written in the background, marker last.

Imported by `run.py`, recovery, weights, rundir and commands; uses engines and `state.py`.
"""
