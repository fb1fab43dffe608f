"""Scaling laws: plan runs, collect them, fit, predict, report.

A fit goes from point_files over points to fit, which runs estimates (approach 1: envelope, 2:
isoflop, 3: huber_fit), their intervals (bootstrap, isoflop) and checks;
summary, report and predict show the result.
Imported by commands and `launcher/sweep.py`; uses costs, reporting and config.
"""
