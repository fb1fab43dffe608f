"""Checkpoints in an object store: uploaded while a run trains, and restored elsewhere.

Imported by the commands, the run and its loop; restoring is torch-free, for the launcher.
"""
