"""One module per command of `pretrain`: `add_arguments` and `run`. Lower modules do the work.

The top floor, with demo. Each module is imported only when its command runs.
"""
