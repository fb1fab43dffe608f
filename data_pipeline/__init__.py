"""Text to token shards to lanes of segments.

The lowest of the three packages: imports neither torch, pretrain nor launcher.
"""
