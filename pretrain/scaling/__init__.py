"""Scaling laws: plan, collect, fit, predict, report.

Imported by commands and `launcher/sweep`; uses costs, reporting and config.
"""
