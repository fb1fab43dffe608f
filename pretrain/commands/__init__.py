"""One module per command of `pretrain`: `add_arguments` and `run`. Lower modules do the work.

The top floor. Each module is imported only when its command runs.
"""
