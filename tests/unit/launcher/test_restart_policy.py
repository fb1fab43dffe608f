import signal
from dataclasses import replace

import pytest

from foundation.errors import EXIT_NODE_UNUSABLE
from launcher.restart_policy import (
    RestartPolicy,
    are_all_unusable,
    decide,
    delay_after,
    unresponsive_rank,
)
from launcher.run_state import read_state
from launcher.slurm.former_starts import (
    attempts_without_progress,
    node_to_exclude,
    refusal_of_futile_starts,
)
from launcher.slurm.job_exit import JobEnding, JobExit, excluded_nodes, is_allocated, job_ending
from launcher.slurm.srun import Step
from launcher.stop_signals import StopSignals, StopWhileWaiting
from pretrain.config.cluster import ClusterConfig
from pretrain.config.run import RunConfig
from pretrain.rundir.events import (
    AttemptEnded,
    AttemptReason,
    Event,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    NodeReplaced,
    Outcome,
    ReplacedBecause,
    Submitted,
    TrainingBegan,
    TrainingEnded,
)
from pretrain.rundir.exit_statuses import (
    EXIT_OUT_OF_MEMORY,
    EXIT_SITE_FAILED,
    EXIT_STOPPED,
    NEVER_STARTED,
)
from pretrain.rundir.run_dir import RunDir
from tests.helpers.batch_jobs import BatchJob
from tests.helpers.checkpoints import publish_step
from tests.helpers.full_disk import full_disk
from tests.helpers.jobs import THIS_JOB, attempt_ended, fake_commands, listed

LOCAL = {"may_wait": False, "can_requeue": False}
POLICY = RestartPolicy(attempts_without_progress=3, first_delay=1.0, longest_delay=5.0)


@pytest.mark.parametrize(
    ("statuses", "before", "more", "reason", "action", "count"),
    [
        ((0, 0), 0, {}, "finished", "finished", 1),
        ((0, 0), 0, {"stop_requested": True}, "finished", "finished", 1),
        ((0, 0), 0, {"is_complete": False}, "unsaved", "retry", 1),
        ((EXIT_STOPPED, EXIT_STOPPED), 0, {}, "stop_requested", "stopped", 0),
        ((EXIT_STOPPED, 0), 0, {}, "stop_requested", "stopped", 0),
        ((-15, -15), 0, {"stop_requested": True}, "stop_requested", "stopped", 0),
        ((-15, -15), 0, {}, "rank_failed", "retry", 1),
        ((2, -9), 0, {}, "user_error", "refused", 1),
        ((1, -9), 1, {}, "rank_failed", "retry", 2),
        ((-9, -9), 2, {}, "rank_failed", "give_up", 3),
        ((-14, -9), 2, {}, "hang", "give_up", 3),  # a watchdog's SIGALRM
        ((-9, -9), 2, {"made_progress": True}, "rank_failed", "retry", 0),
        ((EXIT_OUT_OF_MEMORY, -9), 2, {}, "out_of_memory", "retry", 2),  # the next needs less
        ((EXIT_STOPPED, 1), 0, {}, "rank_failed", "retry", 1),
        # The site or a node is to blame: waited for, then left, and never counted.
        ((EXIT_SITE_FAILED, 2), 2, {}, "site_failed", "retry", 2),
        ((EXIT_SITE_FAILED, -9), 2, {"may_wait": False}, "site_failed", "requeue", 2),
        ((EXIT_SITE_FAILED, 1), 2, LOCAL, "site_failed", "give_up", 2),
        ((NEVER_STARTED, NEVER_STARTED), 2, {}, "not_started", "retry", 2),
        ((-9, NEVER_STARTED), 2, {}, "not_started", "retry", 2),
        ((-15, NEVER_STARTED), 2, {"may_wait": False}, "not_started", "requeue", 2),
        ((NEVER_STARTED, 1), 2, {}, "rank_failed", "give_up", 3),  # a rank failed by itself
        ((NEVER_STARTED, 2), 2, {}, "user_error", "refused", 3),
        # A rank says that its node is at fault; without other nodes its user has to act.
        ((EXIT_NODE_UNUSABLE, 2, -9), 2, {}, "node_unusable", "retry", 2),
        ((1, EXIT_NODE_UNUSABLE), 2, {"may_wait": False}, "node_unusable", "requeue", 2),
        ((EXIT_NODE_UNUSABLE,), 0, {"can_requeue": False}, "user_error", "refused", 1),
    ],
)
def test_what_follows_from_how_the_ranks_ended(statuses, before, more, reason, action, count):
    found = decide(statuses, more.pop("made_progress", False), before, POLICY, **more)
    assert found == (AttemptReason(reason), NextAction(action), count)


@pytest.mark.parametrize(
    ("reason", "policy", "delays"),
    [
        ("rank_failed", POLICY, [2.0, 4.0, 5.0, 5.0]),
        # The site and its nodes have longer to recover.
        ("not_started", RestartPolicy(), [10.0, 20.0, 40.0, 60.0]),
        ("site_failed", RestartPolicy(), [10.0, 20.0]),
        ("out_of_memory", RestartPolicy(), [0.0, 0.0]),
    ],
)
def test_the_delay_doubles_up_to_its_limit(reason, policy, delays):
    counts = range(1, len(delays) + 1)
    assert [delay_after(AttemptReason(reason), count, policy) for count in counts] == delays


def cut(number: int, trained: float, starting: float = 50.0, steps: int = 1) -> list[Event]:
    """The events of a start of job 7 that its time limit ended; the `number`-th."""
    begin, step = 1000.0 * number, 10 * number
    end = begin + starting + trained
    return [
        JobStarted(time=begin, job="7", restart=number, nodes=("n1",), step=step),
        TrainingBegan(time=begin + starting, step=step, world_size=2),
        TrainingEnded(outcome=Outcome.STOPPED, time=end, step=step + steps),
        JobEnded(time=end + 1, job="7", restart=number, reason=JobEndReason.TIME_LIMIT_NEAR,
                 requeued=True, step=step + steps),
    ]  # fmt: skip


FUTILE = cut(0, 10.0) + cut(1, 10.0) + cut(2, 10.0)


@pytest.mark.parametrize(
    ("ledger", "is_futile"),
    [
        (FUTILE, True),
        (FUTILE[4:], False),  # too few
        (cut(0, 10.0) + cut(1, 60.0) + cut(2, 10.0), False),  # one gained more
        (cut(0, 500.0, steps=0) + FUTILE[4:], True),  # no checkpoint holds it
        ([*FUTILE[:8], FUTILE[8], FUTILE[11]], True),  # the last one never trained
        ([*FUTILE[:7], replace(FUTILE[7], reason=JobEndReason.PREEMPTED), *FUTILE[8:]], False),
        ([replace(e, job="8") if hasattr(e, "job") else e for e in FUTILE], False),
    ],
)
def test_starts_that_a_time_limit_ended_before_they_gained_anything_are_futile(ledger, is_futile):
    refusal = refusal_of_futile_starts(ledger, "7", 3, "00:02:00")
    assert bool(refusal) is is_futile
    assert not is_futile or "raise time_limit in the cluster file" in refusal
    shortened = refusal_of_futile_starts(ledger, "7", 3, "00:02:00", "1:00:00")
    assert not is_futile or "launcher resume" in shortened


def test_a_job_of_futile_starts_is_not_requeued_and_the_ledger_says_why(tmp_path, monkeypatch):
    run_dir, now = RunDir(tmp_path), [0.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    for event in FUTILE[:-1]:
        now[0] = event.time
        run_dir.ledger.append(event)
    publish_step(run_dir.checkpoints, 21)
    job_exit = JobExit(replace(THIS_JOB, restart=2), run_dir.path, StopSignals(), most_futile=3)
    # To requeue the job would fail: there is no Slurm here.
    job_exit._end(JobEnding(JobEndReason.TIME_LIMIT_NEAR, requeue=True))
    ended = run_dir.ledger.read()[-1]
    assert isinstance(ended, JobEnded)
    assert (ended.reason, ended.requeued) == (JobEndReason.ERROR, False)
    assert all(each in ended.message for each in ("3 starts", "50 s", "time_limit"))


def test_only_the_one_rank_that_had_to_be_killed_made_an_attempt_hang():
    for statuses, rank in (((1, -9, 1), 1), ((1, 1), None), ((-9, -9), None)):
        assert unresponsive_rank(statuses) == rank


PREEMPT_TIME = {"PreemptTime": "2026-11-21T07:57:06"}
RUNNING = {"JobState": "RUNNING", "Reason": "None", "PreemptTime": "None", "Restarts": "2"}
REQUEUED = {**RUNNING, "JobState": "COMPLETING", "Restarts": "3"}
CUT_BY_PREEMPTION = "*** JOB 4 ON n1 CANCELLED AT T DUE TO PREEMPTION ***"
CUT_BY_REQUEUE = "*** STEP 4.0 ON n1 CANCELLED AT T DUE TO JOB REQUEUE ***"
CUT_BY_USER = f"{CUT_BY_PREEMPTION}\n*** JOB 4 ON n1 CANCELLED AT T ***"
AT_LIMIT, HELD_JOB = {"Reason": "TimeLimit"}, {"Reason": "launch_failed_requeued_held"}
COMPLETING, ENDED = {"JobState": "COMPLETING"}, {"JobState": "PREEMPTED"}
NO_REQUEUE = {"Requeue": "0"}


@pytest.mark.parametrize(
    ("fields", "log", "was_warned", "reason", "flags"),
    [
        (RUNNING, "", True, "time_limit_near", "requeue"),
        (RUNNING, "", False, "stop_requested", "requeue"),
        (RUNNING | PREEMPT_TIME, "", False, "preempted", "requeue"),
        (RUNNING | PREEMPT_TIME | COMPLETING, "", False, "preempted", "requeue is_immediate"),
        (RUNNING | PREEMPT_TIME | ENDED | NO_REQUEUE, "", False, "preempted",
         "is_immediate is_final"),
        (RUNNING | PREEMPT_TIME | COMPLETING, CUT_BY_USER, False, "canceled", "is_immediate"),
        (RUNNING | AT_LIMIT | NO_REQUEUE, "", True, "time_limit", "is_immediate is_final"),
        (RUNNING | AT_LIMIT, "", True, "time_limit", "requeue is_immediate"),
        (RUNNING | {"JobState": "CANCELLED"}, "", False, "canceled", "is_immediate"),
        (RUNNING | COMPLETING, "", True, "canceled", "is_immediate"),
        (REQUEUED, CUT_BY_PREEMPTION, False, "preempted", ""),
        (REQUEUED, CUT_BY_REQUEUE, False, "requeued_by_user", ""),
        (REQUEUED, "", False, "ended_by_slurm", ""),
        (REQUEUED | HELD_JOB, CUT_BY_REQUEUE, False, "prolog_failed", ""),
        (RUNNING | {"JobState": "PENDING"}, CUT_BY_PREEMPTION, False, "forgotten", ""),
        ({}, "", False, "forgotten", ""),
    ],
)  # fmt: skip
def test_why_a_job_ends_and_who_requeues_it(fields, log, was_warned, reason, flags):
    expected = JobEnding(JobEndReason(reason), requeue=False)
    expected = replace(expected, **dict.fromkeys(flags.split(), True))
    assert job_ending(fields, 2, log, was_warned) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"JobState": "SUSPENDED"}, True),
        (PREEMPT_TIME, False),  # in its grace time
        ({"JobState": "COMPLETING"}, False),
        ({"Restarts": "3"}, False),
        ({"Restarts": "1"}, False),
        ({"JobState": "PENDING"}, False),  # the controller has forgotten the start
        ({"StartTime": "2026-11-21T07:58:00"}, False),  # and has made another one of this number
    ],
)
def test_a_start_has_its_nodes_while_slurm_says_so_of_this_very_start(fields, expected):
    began = "2026-11-21T07:57:00"
    assert is_allocated({**RUNNING, "StartTime": began, **fields}, 2, began) is expected
    assert not is_allocated({}, 2, began)


def test_a_failed_node_is_named():
    log = "*** JOB 3 ON n1 CANCELLED AT T DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
    ending = job_ending(REQUEUED, 2, f"srun: error: Node failure on n2\n{log}\n")
    assert ending == JobEnding(JobEndReason.NODE_FAILED, requeue=False, node="n2")


def job_started(job: str, restart: int = 0, step: int = 0) -> JobStarted:
    return JobStarted(job=job, restart=restart, nodes=("n1",), step=step)


def ended(job: str, reason: JobEndReason, requeued: bool = False, **more) -> JobEnded:
    return JobEnded(job=job, restart=0, reason=reason, requeued=requeued, **more)


def attempt(job: str, then: NextAction, before: int, after: int, first=None) -> AttemptEnded:
    more = {"job": job, "first_failure": first, "step_before": before, "step": after}
    return attempt_ended(then, statuses=(-9, 1, 1, 1), **more)


RETRY = NextAction.RETRY
NEVER = replace(attempt("7", RETRY, 5, 5, 2), reason=AttemptReason.NOT_STARTED)
PREEMPTED, FINISHED = JobEndReason.PREEMPTED, JobEndReason.FINISHED


def test_attempts_of_former_starts_count_unless_they_were_asked_to_stop():
    ledger = [
        attempt("6", RETRY, 0, 0),
        job_started("7"),
        attempt("7", RETRY, 0, 50),
        attempt("7", NextAction.STOPPED, 50, 80),
        ended("7", PREEMPTED, requeued=True),
        job_started("7", 1, 80),
        ended("7", JobEndReason.FIRST_NODE_LOST, requeued=True, step_before=80, step=80),
        job_started("7", 2, 80),
    ]
    assert attempts_without_progress(ledger, "7") == 1
    failed = replace(attempt("7", RETRY, 80, 80), without_progress=2)
    assert attempts_without_progress([*ledger, failed], "7") == 2
    gained = replace(ledger[-2], step=90)
    assert attempts_without_progress([*ledger, failed, gained], "7") == 0


@pytest.fixture
def batch(tmp_path, monkeypatch) -> BatchJob:
    return BatchJob(tmp_path, monkeypatch)


LOST, FAILED = ["SupervisorKilled", "JobStarted", "error"], ["JobStarted", "AttemptEnded"]


@pytest.mark.parametrize(
    ("ledger", "restart", "status", "added"),
    [
        ([], 0, 2, [*FAILED, "gave_up"]),
        ([job_started("7")], 0, 2, LOST),
        ([job_started("7")], 1, 2, ["first_node_lost", "JobStarted", "error"]),
        ([job_started("7"), job_started("8")], 0, 2, LOST),
        # A start of this number that Slurm has forgotten: nothing of it counts.
        (
            [replace(job_started("7"), began="2026-11-20T00:00:00")],
            0,
            2,
            ["forgotten", *FAILED, "gave_up"],
        ),
        ([job_started("7"), ended("7", FINISHED)], 0, 0, []),
        ([job_started("7"), ended("7", PREEMPTED, requeued=True)], 0, EXIT_STOPPED, []),
        ([job_started("7"), ended("7", PREEMPTED, requeued=True)], 1, 2, [*FAILED, "gave_up"]),
        # Another start of this number.
        ([job_started("7"), ended("7", JobEndReason.FORGOTTEN)], 0, 2, [*FAILED, "gave_up"]),
        ([job_started("8")], 0, 2, ["JobStarted", "run_in_use"]),
        ([job_started("8"), ended("8", PREEMPTED, True)], 0, 2, ["JobStarted", "run_in_use"]),
        ([job_started("8"), ended("8", FINISHED)], 0, 2, [*FAILED, "gave_up"]),
    ],
)
def test_a_start_goes_on_from_the_ledger(batch, ledger, restart, status, added):
    batch.write(Submitted(job="8", work_dir="/runs/here"), *ledger)
    batch.restart, batch.queue = restart, ["8|8|N/A|RUNNING|None|n1|N/A|/runs/here"]
    assert batch.run("--attempts-without-progress=1", statuses=[(1, -9)]) == status
    assert batch.new_events() == added


REPLACED = NodeReplaced(job="7", node="n2", spare="n3", reason=ReplacedBecause.NODE_FAILED)
STEP = Step(nodes=("n1", "n2"), ranks=4, cluster=ClusterConfig(ranks_per_node=2))


@pytest.mark.parametrize(
    ("attempts", "node"),
    [
        ([attempt("7", RETRY, 5, 5, 2), attempt("7", RETRY, 5, 5, 3)], "n2"),
        ([attempt("7", RETRY, 5, 5, 2)], None),
        ([attempt("7", RETRY, 5, 5, 0), attempt("7", RETRY, 5, 5, 3)], None),
        ([attempt("7", RETRY, *steps, 2) for steps in ((5, 5), (5, 9), (9, 9))], None),
        ([attempt("7", RETRY, 0, 5, 2), attempt("7", RETRY, 5, 9, 2)], None),
        ([attempt("8", RETRY, 5, 5, 2), attempt("7", RETRY, 5, 5, 3)], None),
        ([attempt("7", RETRY, 5, 5, 2), NEVER], None),  # no rank of it has failed
        ([attempt("7", RETRY, 5, 5, 2), REPLACED, attempt("7", RETRY, 5, 5, 3)], None),
    ],
)
def test_a_node_that_fails_twice_in_a_row_without_progress_is_excluded(attempts, node):
    earlier = [job_started("7"), attempt("7", RETRY, 0, 0, 2), ended("7", PREEMPTED, requeued=True)]
    ledger = [*earlier, job_started("7", 1), *attempts]
    assert node_to_exclude(ledger, "7", STEP.node_of) == node


def test_a_node_whose_own_rank_says_that_it_is_unusable_is_excluded_at_once():
    said = replace(attempt("7", RETRY, 0, 0, 3), reason=AttemptReason.NODE_UNUSABLE)
    ledger = [job_started("7"), attempt("7", RETRY, 0, 0, 0), said]
    assert node_to_exclude(ledger, "7", STEP.node_of) == STEP.node_of(3)


@pytest.mark.parametrize(
    ("ends", "has_trained", "expected"),
    [("uu", False, True), ("ruu", False, True), ("u", False, False), ("ur", False, False),
     ("uru", False, False), ("uu", True, False)],
)  # fmt: skip
def test_after_two_unusable_nodes_a_run_that_never_trained_takes_no_fourth(
    ends, has_trained, expected
):
    """Such as a driver that is too old everywhere."""
    reasons = {"u": AttemptReason.NODE_UNUSABLE, "r": AttemptReason.RANK_FAILED}
    said = [replace(attempt("7", RETRY, 0, 0, 3), reason=reasons[end]) for end in ends]
    began = [TrainingBegan(step=0, world_size=2)] * has_trained
    assert are_all_unusable([job_started("7"), *began, *said]) is expected


def test_excluded_nodes_are_remembered():
    excluded = JobEndReason.NODE_EXCLUDED
    ledger = [
        job_started("7"),
        ended("7", excluded, node="n2"),
        ended("8", excluded, node="n3"),
        ended("7", JobEndReason.NODE_FAILED, node="n4"),
        ended("7", JobEndReason.NOT_STARTED, node="n1,n[7-8]"),
    ]
    assert excluded_nodes(ledger, "7") == ["n2", "n1", "n7", "n8"]


SCONTROL = """: > "$0.$1"
if [ "$1 $ANSWER" = "requeue denied" ]; then echo "Access/permission denied" >&2; exit 1; fi
echo "JobId=7 JobState=RUNNING Reason=None PreemptTime=None Restarts=0 Requeue=1"
echo "   WorkDir=/x"
"""
HELD = """echo "JobId=7 JobState=PENDING Reason=launch_failed_requeued_held Restarts=1"
echo "   WorkDir=/x"
"""


def test_a_job_that_slurm_holds_after_a_prolog_names_the_node(tmp_path, monkeypatch):
    fake_commands(
        tmp_path, monkeypatch, scontrol=HELD, sinfo=listed("n1|none", "n2|Prolog error", fields=2)
    )
    run_dir = RunDir.create(tmp_path / "run", RunConfig())
    job_exit = JobExit(THIS_JOB, run_dir.path, StopSignals(), most_futile=3)
    assert not job_exit.is_allocated()
    job_exit.end_after_attempts(EXIT_STOPPED)
    state = read_state(run_dir.path)
    assert state.state == "requeued"
    assert "node n2" in state.reason


@pytest.mark.parametrize("answer", ["requeued", "denied"])
def test_a_stopping_job_is_requeued_on_a_full_disk(tmp_path, monkeypatch, caplog, answer):
    monkeypatch.setenv("ANSWER", answer)
    fake_commands(tmp_path, monkeypatch, scontrol=SCONTROL)
    run_dir = RunDir.create(tmp_path / "run", RunConfig())
    run_dir.ledger.append(job_started("7"))
    with open(run_dir.ledger.path, "a") as ledger:
        ledger.write(" " * 4096 + "\n")
    stop = StopSignals()
    stop.requests, stop.received = 1, [int(signal.SIGUSR1)]  # ahead of the time limit
    job_exit = JobExit(THIS_JOB, run_dir.path, stop, most_futile=3)
    patient = RunDir(run_dir.path, stop.retry(600, job_exit.poll))
    with run_dir.locked("launcher"), full_disk(4096):
        with pytest.raises(StopWhileWaiting):
            patient.ledger.append(attempt("7", RETRY, 0, 0))
        job_exit.end_after_attempts(EXIT_STOPPED)
    assert (tmp_path / "scontrol.requeue").exists()
    missing = [each for each in caplog.messages if " not in the ledger: " in each]
    assert len(missing) == (2 if answer == "denied" else 1)
    assert not [event for event in run_dir.ledger.read() if isinstance(event, JobEnded)]
