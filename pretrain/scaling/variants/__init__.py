"""Variants of a model at equal training FLOPs: a comparison's file, its cells, its results.

Imported by commands; uses the sweeps and plans of `pretrain/scaling`, costs and reporting.
"""
