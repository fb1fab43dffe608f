"""Scaling laws: plan the runs of a sweep, collect them into a table, fit laws to it, report them.

A fit goes from `table.py` to `fit.py`, with the laws of `law.py` and `frontier.py`.
"""
