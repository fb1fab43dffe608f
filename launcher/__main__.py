"""`python -m launcher`: the same as the console script."""

import sys

from launcher.cli import main

sys.exit(main())
