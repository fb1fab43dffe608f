"""The demo: build, train, kill, resume, compare, evaluate, sample and report with one command.

The top floor, with commands.
"""
