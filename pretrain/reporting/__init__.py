"""HTML reports, figures and a run's history as data to draw. Torch-free.

Imported by commands, demo and scaling; uses rundir, config and terminal.
"""
