"""`python -m tests.histories --minutes 60`; exit status 1 if there was a finding."""

import argparse
import importlib
import os

# name -> its module and class, imported when it is asked for
MACHINES = {
    "checkpoints": ("tests.histories.checkpoint_machine", "CheckpointHistory"),
    "supervisor": ("tests.histories.supervisor_machine", "SupervisorHistory"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.histories")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each machine")
    parser.add_argument("--machine", choices=MACHINES, nargs="*", default=list(MACHINES))
    parser.add_argument("--seed", type=int, help="of the first histories (default: a random one)")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.histories.runner import run_for

    findings = 0
    for name in arguments.machine:
        module, kind = MACHINES[name]
        machine = getattr(importlib.import_module(module), kind)
        print(f"{name}:", flush=True)
        findings += run_for(machine, arguments.minutes, arguments.seed)
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
