"""The commands of `pretrain`, one module for each: its flags, what it calls, what it prints.

A module is imported only when its command runs.
"""
