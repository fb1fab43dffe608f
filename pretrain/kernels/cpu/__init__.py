"""Relative attention in cache-sized tiles, with its own backward pass."""
