from __future__ import annotations

import os

# One thread per process: workers and ranks share the cores, and threads that wait for each other cost many times more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
