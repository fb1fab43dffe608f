"""A model as a directory that Hugging Face transformers reads without this project.

Only the three files `*_xl_pretrain` import transformers, and nothing imports them: they are copied
into exports.
"""
