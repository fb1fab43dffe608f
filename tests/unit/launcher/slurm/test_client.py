"""What Slurm's commands print is read by one reader, whatever stands around and in the answers."""

import subprocess
from pathlib import Path

import pytest

from foundation.errors import UserError
from launcher.slurm.client import QueuedJob, Slurm, SlurmUnreachable, node_names
from launcher.slurm.sbatch import check_request
from pretrain.config.cluster import ClusterConfig, NodeRange
from tests.helpers.jobs import fake_commands, records, scripted

ROW = "24|24|N/A|RUNNING|None|n1|N/A|/runs/a|b/slurm/code"
JOB = QueuedJob("24", "24", "N/A", "RUNNING", "None", "n1", "N/A", "/runs/a|b/slurm/code")
WHOLE = records(ROW)
BANNER = "Welcome!\nNo jobs in the queue|of|the|site|today|24|RUNNING|x\n"
DETAILS = "JobId=7 JobName=a Restarts=9\n   Requeue=1 Restarts=0\n   JobState=RUNNING\n"
DETAILS += "   WorkDir=/runs/with spaces Restarts=3\n   Comment=by policy Requeue=0\n Restarts=8\n"
FIELDS = {"JobId": "7", "Requeue": "1", "Restarts": "0", "JobState": "RUNNING"}
FIELDS |= {"WorkDir": "/runs/with spaces Restarts=3"}


def failed(said: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 1, "", said)


@pytest.mark.parametrize(
    "broken",
    [
        "",
        BANNER,
        WHOLE[:-3],  # cut, here and below
        WHOLE[: WHOLE.index("RUNN")] + "\n" + records(ROW),
        WHOLE.replace("RUNNING", "extra|RUNNING"),
        WHOLE.replace("|/runs", "|extra|/runs"),
        WHOLE.replace("24|24", "two|24"),
        ROW,
        WHOLE.replace("|lx", "|lx|comment"),
        failed("slurm_load_jobs error: Unable to contact slurm controller"),
    ],
)
def test_an_answer_that_is_not_whole_is_none_and_slurm_is_asked_again(broken):
    with pytest.raises(SlurmUnreachable):
        scripted(broken).jobs(["24"])
    slurm = scripted(broken, "up", f"{BANNER}{WHOLE}bye\n")
    assert slurm.answered(slurm.jobs, ["24"]) == [JOB]


def test_no_job_is_an_answer():
    assert scripted(records()).jobs(["24"]) == []
    assert scripted(failed("slurm_load_jobs error: Invalid job id specified")).jobs(["24"]) == []


@pytest.mark.parametrize(
    "broken", ["", BANNER, DETAILS[:60], DETAILS.replace("Restarts=0", "Restarts=?"),
               failed("Munge encode failed"), failed("slurm_load_jobs error: Socket closed")]
)  # fmt: skip
def test_a_job_is_forgotten_only_by_slurms_own_word(broken):
    with pytest.raises(SlurmUnreachable):
        scripted(broken).details("7")
    assert scripted(failed("slurm_load_jobs error: Invalid job id specified")).details("7") == {}
    comment = DETAILS.replace("\n", "\n   Comment=two\n\nparagraphs\n", 1)
    for whole in (f"JobState=FAILED today\n{DETAILS}\n\nJobId=8 Restarts=4", comment):
        assert scripted(whole).details("7") == FIELDS


def test_bytes_that_are_no_text_and_what_users_write_break_no_answer(tmp_path, monkeypatch, caplog):
    answers = {
        "scontrol": rf"printf '{DETAILS}   AdminComment=gepr\xfcft\n'".replace("\n", r"\n"),
        "squeue": f"printf '{WHOLE}' | sed 's/None/gepr\\xfcft/'; echo $* >> $0.asked",
        "sacct": "echo 'sacct: error: Connection refused' >&2; exit 1",
    }
    fake_commands(tmp_path, monkeypatch, **answers)
    slurm = Slurm()
    assert slurm.details("7") == FIELDS
    (job,) = slurm.jobs(["24", "8,9", "8\n9", "10_2"])
    assert (job.reason, job.work_dir) == (r"gepr\xfcft", JOB.work_dir)
    assert "-j 24,10_2 " in (tmp_path / "squeue.asked").read_text()
    assert slurm.records(["7"]) == []
    (warning,) = caplog.messages
    assert "sacct" in warning


LEDGER = "JobID|xl|State|xl|WorkDir|xl|\n7|xl|NODE_FAIL|xl|/a|b|xl|\n"


@pytest.mark.parametrize(
    ("printed", "states", "warnings"),
    [(BANNER + LEDGER, ["NODE_FAIL"], 0), (LEDGER[:-5], [], 0), (BANNER, [], 1), ("", [], 1),
     (failed("Slurm accounting storage is disabled"), [], 0)],
)  # fmt: skip
def test_accounting_is_read_by_its_own_marks(printed, states, warnings, caplog):
    assert [each.state for each in scripted(printed).records(["7"])] == states
    assert len(caplog.messages) == warnings


@pytest.mark.parametrize(
    ("printed", "queue", "expected"),
    [
        ("25\n", WHOLE, ("25", "/x")),  # already forgotten
        ("24;lab\n", WHOLE, ("24", JOB.work_dir)),  # the site has another directory for it
        (
            "Welcome!\n7 days\n24\n",
            records(ROW.replace("/runs/a|b/slurm/code", "/x")),
            ("24", "/x"),
        ),
        ("99\n24\n", records(ROW.replace("/runs/a|b/slurm/code", "/x")), ("24", "/x")),
        (
            "Submitted batch job 24",
            records(ROW.replace("/runs/a|b/slurm/code", "/x")),
            ("24", "/x"),
        ),
    ],
)
def test_a_submitted_job_is_read_back_from_the_queue(printed, queue, expected):
    assert scripted(records(), printed, queue).submit(Path("job.sbatch"), "/x") == expected


def test_a_number_that_nobody_prints_is_looked_up_and_never_submitted_again():
    commands = []

    def run(command, _) -> subprocess.CompletedProcess[str]:
        commands.append(command[0])
        return scripted(records() if command[0] == "squeue" else "Welcome!")._runner(command, 1)

    slurm = Slurm(run, scripted("")._clock)
    with pytest.raises(UserError, match="did not print its number"):
        slurm.submit(Path("job.sbatch"), "/x")
    assert commands.count("sbatch") == 1


def test_what_slurm_keeps_private_is_a_note_and_sbatch_decides(caplog):
    denied = scripted(failed("slurm_load_node: Access/permission denied"))
    assert (denied.partitions(), denied.node_states(["n1"])) == ([], {})
    check_request(ClusterConfig(ranks_per_node=2, partition="any"), NodeRange(2, 2), [])
    (note,) = caplog.messages
    assert "sbatch decides" in note


@pytest.mark.parametrize(
    ("text", "names"),
    [("", []), ("n1", ["n1"]), ("n[1-2,10],m03", ["n1", "n2", "n10", "m03"]),
     ("gpu[001-002]-ib", ["gpu001-ib", "gpu002-ib"]),
     ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"])],
)  # fmt: skip
def test_lists_of_nodes_are_expanded_as_slurm_does(text, names):
    assert node_names(text) == names


def test_a_list_of_nodes_that_is_cut_is_no_answer():
    for text in ("n[1-", "n[a-b]"):
        with pytest.raises(SlurmUnreachable):
            node_names(text)
