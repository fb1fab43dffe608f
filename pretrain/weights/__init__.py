"""Model weights into and out of the system: exports and imports.

Imported by commands, evaluation and `run.py`; uses checkpoint and model.
"""
