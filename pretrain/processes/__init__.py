"""Rank processes on one node: start, watch, exit status; checks of a node.

Imported by commands, `run.py` and `launcher`.
"""
