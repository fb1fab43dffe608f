"""Numbers and tables as text; the progress bar. Torch-free.

Imported by everything that prints; uses nothing of `pretrain`.
"""
