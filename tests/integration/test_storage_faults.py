"""What a run does when its storage fails it: each fault is named in one line, and nothing is
trained past it.
"""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.processes.local_ranks import train_command
from tests.helpers.small_disks import needs_mounts
from tests.integration.test_checkpoint_failures import SETTINGS

# A checkpoint of this model takes 1.2 MiB. `$TRAIN` and `$VERIFY` are commands on the directory
# "$RUN".
SMALL_DISK = """
set -u
mount -t tmpfs -o size=2m,mode=700 tmpfs "$RUN"
bash $TRAIN checkpoint.storage_patience_seconds=0 2> "$LOGS/full"; echo "full: $?"
$VERIFY; echo "verified: $?"
# Not a byte is left from the first steps on, until the run has nothing more to train.
PRETRAIN_FAULT=slow:0.2@1 bash $TRAIN 2> "$LOGS/room" & training=$!
seen() { for _ in $(seq 600); do grep -q "$1" "$LOGS/room" && return; sleep 0.1; done; }
seen "MFU ="; cat /dev/zero > "$RUN/filler"
seen "step 20 not saved"
rm "$RUN/filler"
mount -o remount,size=32m "$RUN"
wait $training; echo "room: $?"
cp "$RUN/metrics.jsonl" "$LOGS"
mount -o remount,ro "$RUN"
bash $TRAIN optim.steps=30 checkpoint.storage_patience_seconds=0 2> "$LOGS/read-only"
echo "read-only: $?"
cmp "$RUN/metrics.jsonl" "$LOGS/metrics.jsonl"; echo "untouched: $?"
"""


@pytest.fixture(scope="module")
def experiment(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage") / "tiny.yaml"
    path.write_text(f"data: {{path: {tiny_corpus}}}\n")
    return path


@pytest.mark.slow
@needs_mounts
def test_full_and_read_only_disks_are_named_and_a_full_one_is_outlasted(experiment, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    script = tmp_path / "train.sh"
    script.write_text(f'exec {shlex.join(train_command(experiment, run_dir, *SETTINGS))} "$@"\n')
    verify = f"{sys.executable} -m pretrain checkpoint verify {run_dir}"
    places = {"RUN": str(run_dir), "LOGS": str(tmp_path), "TRAIN": str(script), "VERIFY": verify}
    namespace = ["unshare", "--map-root-user", "--mount", "bash", "-c", SMALL_DISK]
    done = subprocess.run(namespace, capture_output=True, text=True, env={**os.environ, **places})
    said = {name: (tmp_path / name).read_text() for name in ("full", "room", "read-only")}
    ends = dict(re.findall(r"^([a-z-]+): (\d+)$", done.stdout, re.M))
    expected = {"full": "74", "verified": "0", "room": "0", "read-only": "2", "untouched": "0"}
    assert ends == expected, (done, said)
    assert "step 10: valid" in done.stdout
    assert re.search(r"^ERROR .* step 20: .* MiB .* MiB", said["full"], re.M)
    full, locked = os.strerror(errno.ENOSPC), os.strerror(errno.EROFS)
    assert re.search(rf"^WARNING .*: {run_dir}/metrics.jsonl: {full}; ", said["room"], re.M)
    assert re.search(rf"^(error|ERROR .*): .*{locked}", said["read-only"], re.M)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [*range(1, 21), 20]
