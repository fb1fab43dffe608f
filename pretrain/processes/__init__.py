"""Rank processes on one node: their start, device and end; checks of a node."""
