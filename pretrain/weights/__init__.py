"""Model weights into and out of the system: exports, imports, golden vectors.

Imported by commands, evaluation and `run.py`; uses checkpoint and model.
"""
