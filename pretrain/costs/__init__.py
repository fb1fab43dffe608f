"""What a run costs before it starts: parameters, FLOPs, device memory; devices and their speed.

Imported by commands, scaling, reporting and `launcher`; uses config.
"""
