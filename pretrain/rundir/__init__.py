"""A run directory: identity, settings, ledger, fencing and heartbeats."""
