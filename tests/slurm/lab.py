"""A real Slurm of several hosts on this machine, each host in network, process and mount namespaces
of its own.

All of it lives under one process namespace whose first process dies with the one that made it:
nothing stays behind. Hosts can be powered off, cut from the network and brought back; the
controller can be stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

CONTROLLER = "10.206.0.254"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
FABRIC = r"""
set -e
D=$1; N=$2
ip link set lo up; ip link add br0 type bridge
ip addr add 10.206.0.254/24 dev br0; ip link set br0 up
mount --bind $D/hosts /etc/hosts; mount --bind $D/nsswitch /etc/nsswitch.conf
export SLURM_CONF=$D/slurm.conf
/usr/sbin/munged --foreground --force --key-file=$D/munge/key --socket=$D/munge/s \
  --pid-file=$D/munge/pid \
  --log-file=$D/munge/log --seed-file=$D/munge/seed &
until [ -S $D/munge/s ]; do sleep 0.05; done
[ ! -f $D/accounting.sh ] || . $D/accounting.sh
/usr/sbin/slurmctld -D -i -f $D/slurm.conf &
until scontrol ping 2>/dev/null | grep -q UP; do sleep 0.1; done
for i in $(seq $N); do bash $D/boot.sh $D $i; done
while :; do sleep 60 & wait $!; done
"""
# A host is one process namespace: to end its first process is to pull the plug.
BOOT = r"""
D=$1; I=$2
setsid unshare --net --uts --ipc --mount --pid --fork --kill-child --mount-proc bash -c '
  hostname n$2; mount -t tmpfs disk-of-n$2 /mnt
  ip link set lo up; until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
  ip addr add 10.206.0.$2/24 dev eth0; ip link set eth0 up
  export SLURM_CONF=$1/slurm.conf
  /usr/sbin/slurmd -D -N n$2 -f $1/slurm.conf & while :; do sleep 60 & wait $!; done' host $D $I \
  < /dev/null >> $D/n$I.out 2>&1 &
P=$!
until [ "$(readlink /proc/$P/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link del ve$I 2>/dev/null || true
ip link add ve$I type veth peer name eth0 netns $P; ip link set ve$I master br0 up
echo $P > $D/n$I.pid
"""
ACCOUNTING = r"""
mariadb-install-db --no-defaults --datadir=$D/db --user=root \
  --auth-root-authentication-method=normal --skip-test-db
mariadbd --no-defaults --datadir=$D/db --user=root --socket=$D/db.s --pid-file=$D/db.pid \
  --bind-address=127.0.0.1 \
  --skip-name-resolve --innodb-buffer-pool-size=64M --innodb-flush-log-at-trx-commit=0 &
until mariadb --no-defaults -uroot -S$D/db.s -e "
  create user slurm@'127.0.0.1' identified by 'slurm';
  grant all on *.* to slurm@'127.0.0.1'"; do sleep 0.2; done
/usr/sbin/slurmdbd -D &
until sacctmgr -n list cluster; do sleep 0.2; done
sacctmgr -i add cluster lab
"""


class SlurmLab:
    """Use as a context manager; `run` runs a command on the controller's host, which serves as
    login node.

    With `accounting` there is a database of jobs, and the controller itself forgets those that
    ended within seconds.
    """

    def __init__(self, num_nodes: int = 4, accounting: bool = False) -> None:
        self._accounting = accounting
        self.nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        # Short: a socket's path has at most 108 bytes.
        self.path = Path(tempfile.mkdtemp(prefix="lab", dir="/tmp"))

    def __enter__(self) -> SlurmLab:
        self._write_files()
        with open(self.path / "out", "ab") as out:
            self._outer = subprocess.Popen(
                ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
                + ["bash", "-c", FABRIC, "fabric", str(self.path), str(len(self.nodes))],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        try:
            self.wait_until_idle(*self.nodes, seconds=100)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the lab: their namespace ends with its first process."""
        self._outer.kill()
        self._outer.wait()
        for _ in range(20):  # what still dies may still write
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            time.sleep(0.1)

    def popen(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command on the controller's host."""
        enter = ["nsenter", "-t", self._first_process(), "-n", "-m", "-p"]
        enter += [f"--wdns={os.getcwd()}", "--"]
        environment = {**os.environ, "SLURM_CONF": str(self.path / "slurm.conf"), **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*enter, *command], env=environment, text=True, **pipes)

    def run(self, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller's host."""
        process = self.popen(*command)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def run_on(self, node: str, *command: str) -> None:
        """Run a command among a host's processes and mounts."""
        first = self.run("pgrep", "-P", self._process_of(node)).stdout.strip()
        self._checked("nsenter", "-t", first, "-n", "-m", "-p", "-u", "--", *command)

    def power_off(self, node: str) -> None:
        """All that ran on the host is gone at once, its addresses too."""
        self._checked("kill", "-9", self._process_of(node))

    def _process_of(self, node: str) -> str:
        return (self.path / f"{node}.pid").read_text().strip()

    def boot(self, node: str) -> None:
        """Bring a host back after `power_off`."""
        self._checked("bash", str(self.path / "boot.sh"), str(self.path), node[1:])
        # A requeued job may start on it at once.
        self.wait_until_idle(node, states=("idle", "mix", "alloc"))

    def cut(self, node: str) -> None:
        """The host goes on running, without network."""
        self._checked("ip", "link", "set", f"ve{node[1:]}", "down")

    def heal(self, node: str) -> None:
        """Undo `cut`, and let the host report to Slurm, which asks about once a minute."""
        self._checked("ip", "link", "set", f"ve{node[1:]}", "up")
        self.run_on(node, "pkill", "-HUP", "-x", "slurmd")

    @contextlib.contextmanager
    def slow_to_give_nodes_up(self) -> Iterator[None]:
        """In the block Slurm waits for a node that does not respond as long as on usual sites."""
        conf = self.path / "slurm.conf"
        before = conf.read_text()
        try:
            conf.write_text(before.replace("SlurmdTimeout=10\n", "SlurmdTimeout=300\n"))
            self._checked("scontrol", "reconfigure")
            yield
        finally:
            conf.write_text(before)
            self._checked("scontrol", "reconfigure")

    @contextlib.contextmanager
    def forgotten_by_the_controller(self, job: str) -> Iterator[None]:
        """What happens in the block to jobs is lost to the controller: it is killed after it, and
        starts again with what it had saved before, which includes this job.
        """
        name = self.run("squeue", "-h", "-j", job, "-o", "%j").stdout.strip()
        saved, known = self.path / "state" / "job_state", name.encode()
        deadline = time.monotonic() + 30
        while known not in (before := saved.read_bytes() if saved.exists() else b""):
            assert time.monotonic() < deadline, "the controller has not saved the job"
            time.sleep(0.1)
        yield
        self._checked("pkill", "-9", "-x", "slurmctld")
        for file in (saved, saved.with_suffix(".old")):
            file.write_bytes(before)
        start = f"/usr/sbin/slurmctld -D -f {self.path}/slurm.conf >> {self.path}/out 2>&1 &"
        self._checked("bash", "-c", start)

    def stop_controller_at_next_sbatch(self, seconds: float) -> Path:
        """A directory for PATH whose sbatch finds slurmctld stopped, for so long, when it hands
        over its job.
        """
        controller = (self.path / "ctl.pid").read_text().strip()
        script = self.path / "bin" / "sbatch"
        script.parent.mkdir()
        script.write_text(
            f"#!/bin/bash\nkill -STOP {controller}\n"
            f"(sleep {seconds}; kill -CONT {controller}) > /dev/null 2>&1 &\n"
            'exec /usr/bin/sbatch "$@"\n'
        )
        script.chmod(0o755)
        return script.parent

    def wait_until_idle(
        self, *nodes: str, seconds: float = 40, states: Sequence[str] = ("idle",)
    ) -> None:
        """Until the hosts can take jobs and have none, or are in one of these states."""
        deadline, said = time.monotonic() + seconds, {}
        while time.monotonic() < deadline:
            said = dict(
                line.split() for line in self.run("sinfo", "-hNo", "%N %t").stdout.splitlines()
            )
            if all(said.get(node) in states for node in nodes):
                return
            time.sleep(0.2)
        log = (self.path / "out").read_text()[-2000:]
        raise TimeoutError(f"{nodes} are not {states} after {seconds} s: {said}, {log}")

    def _first_process(self) -> str:
        """The id, seen from outside, of the process that the lab lives and dies with."""
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        deadline = time.monotonic() + 10
        while not (found := children.read_text().split()):
            assert time.monotonic() < deadline, (self.path / "out").read_text()
            time.sleep(0.02)
        return found[0]

    def _checked(self, *command: str) -> None:
        result = self.run(*command)
        assert result.returncode == 0, result.stderr

    def _write_files(self) -> None:
        d, name = self.path, os.uname().nodename
        for directory in (d / "state", d / "munge"):
            directory.mkdir()
        for directory in (d, d / "munge"):
            directory.chmod(0o755)
        (d / "munge/key").write_bytes(os.urandom(64))
        (d / "munge/key").chmod(0o600)
        (d / "cgroup.conf").write_text("IgnoreSystemd=yes\n")
        (d / "boot.sh").write_text(BOOT)
        (d / "prolog").write_text(f"#!/bin/sh\n[ ! -e {d}/no-prolog-on-$SLURMD_NODENAME ]\n")
        (d / "prolog").chmod(0o755)
        hosts = ["127.0.0.1 localhost", f"{CONTROLLER} {name}"]
        hosts += [f"10.206.0.{node[1:]} {node}" for node in self.nodes]
        (d / "hosts").write_text("\n".join(hosts) + "\n")
        # No DNS to wait for.
        (d / "nsswitch").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        (d / "slurm.conf").write_text(slurm_conf(d, self.nodes, self._accounting))
        if self._accounting:
            (d / "accounting.sh").write_text(ACCOUNTING)
            (d / "slurmdbd.conf").write_text(slurmdbd_conf(d))
            (d / "slurmdbd.conf").chmod(0o600)


def slurmdbd_conf(d: Path) -> str:
    """The database is reached over the loopback of the controller's host."""
    return f"""AuthType=auth/munge
AuthInfo=socket={d}/munge/s
DbdHost={os.uname().nodename}
DbdAddr={CONTROLLER}
SlurmUser=root
LogFile={d}/dbd.log
PidFile={d}/dbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""


def slurm_conf(d: Path, nodes: list[str], accounting: bool) -> str:
    """Two partitions over the same hosts: jobs of `urgent` preempt those of `main`, with notice;
    all waits short.
    """
    name = os.uname().nodename
    lines = [
        f"NodeName={node} NodeHostname={node} NodeAddr=10.206.0.{node[1:]} "
        "CPUs=8 RealMemory=8000 State=UNKNOWN"
        for node in nodes
    ]
    storage = "none\nMinJobAge=3600"  # a test may ask for a job long after its end
    if accounting:
        where = [f"AccountingStorageHost={CONTROLLER}", f"AccountingStoragePass={d}/munge/s"]
        storage = "\n".join(["slurmdbd", *where, "MinJobAge=2"])
    return f"""ClusterName=lab
SlurmctldHost={name}({CONTROLLER})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={d}/munge/s,cred_expire=5
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool.%n
SlurmctldPidFile={d}/ctl.pid
SlurmdPidFile={d}/slurmd.%n.pid
SlurmctldLogFile={d}/ctl.log
SlurmdLogFile={d}/slurmd.%n.log
Prolog={d}/prolog
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
KillWait=5
OverTimeLimit=0
JobRequeue=1
AccountingStorageType=accounting_storage/{storage}
{chr(10).join(lines)}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF State=UP
"""
