"""Built corpora, local or in an object store: manifests, shards, the node's shard cache.

Imported by builder, lanes, commands, `pretrain` and `launcher`; uses shards and vocabularies.
"""
