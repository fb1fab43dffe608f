"""Kinds of layers: a folder each, with its facts (torch-free) and its module."""
