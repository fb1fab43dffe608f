"""Built corpora, local or in an object store: manifests, shards, the node's shard cache.

Imported by builder, lanes, commands and `pretrain`; uses shards.
"""
