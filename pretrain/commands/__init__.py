"""One module per command of `pretrain`: `add_arguments` and `run`; the work is done by lower modules.

The top floor, with demo. Each module is imported only when its command runs.
"""
