"""Scaling laws: plan runs, collect them, fit, report.

A fit goes from table to fit, with laws of law and frontier; report shows the result.
Imported by commands and `launcher/sweep.py`; uses costs, reporting and config.
"""
