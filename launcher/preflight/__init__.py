"""Comparing nodes with each other to find slow and broken ones.

Imported by commands; pure functions.
"""
