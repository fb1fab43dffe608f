"""Benchmarks: speeds and costs as ratios within one run, each with its goal (`make bench`).

They are not installed: run them at the root of a checkout. They may import everything, also the
reference implementations under `tests/`. Only tests may import them.
"""
