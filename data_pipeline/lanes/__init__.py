"""Which lane reads which document when, and the segments it yields.

Imported by commands and `pretrain`; uses corpora and shards.
"""
