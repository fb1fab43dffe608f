"""`python -m pretrain`: the same as the console script."""

from pretrain.cli import console

console()
