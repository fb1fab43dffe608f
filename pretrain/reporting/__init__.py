"""HTML reports, figures and a run's history as data to draw. Torch-free.

Imported by commands, scaling and `launcher`; uses rundir, costs, config and terminal.
"""
