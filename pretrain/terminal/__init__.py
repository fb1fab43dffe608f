"""Logging; numbers and tables as text. Torch-free.

Imported by everything that prints; uses nothing of `pretrain`.
"""
