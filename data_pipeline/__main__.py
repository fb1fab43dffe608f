"""`python -m data_pipeline` is `data-pipeline`."""

from __future__ import annotations

import sys

from data_pipeline.cli import main

sys.exit(main())
