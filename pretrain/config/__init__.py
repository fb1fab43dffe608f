"""Settings of a run, frozen and checked. Torch-free.

Imported by almost everything; uses data_pipeline alone.
"""
