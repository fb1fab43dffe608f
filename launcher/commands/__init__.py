"""One module per command of `launcher`.

Only `launcher/cli.py` and the supervisor's batch script import them; uses everything below.
"""
