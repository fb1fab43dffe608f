"""The demo: build, train, kill, resume, compare, evaluate and sample, as one command.

The top floor, with commands.
"""
