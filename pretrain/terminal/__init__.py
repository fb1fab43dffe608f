"""Logging; numbers and tables as text. Torch-free."""
