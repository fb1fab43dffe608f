"""What to run first on a GPU: an ordered list of steps, whose findings are committed.

`steps.py` lists them, `command.py` runs those that have no result yet, each in a process of its own
(`processes.py`), and `findings.py` writes what they find at once. docs/performance.md says how to
use it.
"""
