"""The commands of `pretrain`, a module each: its command line, what it calls, what it prints.

A module is imported only when its command runs.
"""
