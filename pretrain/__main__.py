"""`python -m pretrain`: the same as the console script."""

import sys

from pretrain.cli import main

sys.exit(main())
