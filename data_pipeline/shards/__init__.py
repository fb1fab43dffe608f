"""The two shard formats, MDS and WebDataset tars, written and memory-mapped.

Imported by every other folder here; uses none of them.
"""
