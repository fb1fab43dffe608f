"""Text sources to a corpus: documents, tokens, shards, resumable at any point.

Imported by commands and `pretrain`; uses corpora, shards and vocabularies.
"""
