"""Installs the stubs of GPU_STUBS in ranks, before anything else."""

import os
import sys
from pathlib import Path

PROGRAMS = ("pretrain.processes.node_check", "train")

if "GPU_STUBS" in os.environ and any(word in PROGRAMS for word in sys.orig_argv):
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.gpu_stubs.devices import install, stub_of

    if (stub := stub_of(os.environ)) is not None:
        install(stub)
