"""One module per command of `pretrain`; each is imported only when its command runs.

The top floor, with demo.
"""
