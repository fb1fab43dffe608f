"""Measurements of speed and cost, as ratios within one run (`make bench`, `make bench-gpu`).

Not installed with the packages: a checkout is needed. May import everything, the tests' references too.
"""
