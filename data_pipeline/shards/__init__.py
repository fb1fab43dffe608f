"""The two shard formats, MDS and WebDataset tars, written and memory-mapped.

Imported by corpora, lanes, builder and commands; uses no other folder.
"""
