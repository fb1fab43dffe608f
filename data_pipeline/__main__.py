"""`python -m data_pipeline` is `data-pipeline`."""

import sys

from data_pipeline.cli import main

sys.exit(main())
