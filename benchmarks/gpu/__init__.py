"""The prepared half hour on a GPU: an ordered list of steps, each with its own result.

`steps.py` lists them, `command.py` runs them, each in a process of its own (`processes.py`) that
writes what it finds at once (`report.py`). docs/performance.md says how to use it.
"""
