"""Sweeps: files that list the cells of an experiment, and the runs of those cells."""
