"""The process group: ranks, broadcasts, sums, errors raised on all ranks.

Imported by everything that trains; uses nothing of `pretrain`.
"""
