"""Parameters, FLOPs and memory of a run before it starts.

Imported by commands, scaling, reporting and `launcher`; uses config.
"""
