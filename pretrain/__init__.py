"""Training, evaluation and scaling laws of Transformer-XL.

Uses data_pipeline, never launcher. The floors are listed in docs/design.md.
"""
