"""Text sources to a corpus: documents, tokens, shards, resumable at any point.

Imported by commands; uses corpora and shards.
"""
