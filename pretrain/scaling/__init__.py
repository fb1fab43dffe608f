"""Scaling laws: plan runs, collect them, fit, predict, report.

A fit goes from point_files over points to fit, with laws of law and frontier; summary, report and
predict show the result.
Imported by commands and `launcher/sweep.py`; uses costs, reporting and config.
"""
