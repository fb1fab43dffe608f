"""A run directory: identity, settings, ledger, fencing, heartbeats. Torch-free.

Imported by everything that reads or writes a run; uses config and the checkpoint directory.
"""
