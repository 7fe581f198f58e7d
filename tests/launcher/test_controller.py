"""The batch script's other half as a real process, on damaged histories; Slurm's commands are
stand-ins."""

from __future__ import annotations

import calendar
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import launcher.slurm.controller
from launcher.runtime.environment import candidates
from launcher.runtime.verdict import read_verdict, write_verdict
from launcher.slurm.attempts import History
from tests.data.shards import write_counts
from tests.launcher.conftest import PATIENCE, ROOT
from tests.launcher.conftest import until as in_time
from tests.warm import Command

COMMANDS = {
    "squeue": 'case "$*" in *%T*) echo "$STATE";; *) echo N/A;; esac',
    "scontrol": 'echo "$*" >> "$SAID"; case "$*" in show*) echo n1;; esac',
    "sinfo": "true",
    "scancel": "true",
}

# ranks that Slurm has told to end
SAVING = "trap '' TERM; echo $$ > $0.tmp; mv $0.tmp $0; exec sleep 1000"


@pytest.fixture
def bin(tmp_path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, line in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def control() -> None:
    sys.exit(launcher.slurm.controller.main(sys.argv[1:]))


def start(
    recipe: Path,
    bin: Path,
    *command: str,
    state: str = "",
    job: str = "7",
    overrides: Sequence[str] = (),
) -> Command:
    """The ranks are `command`; state: of every job, as Slurm has it."""
    environ = {
        **os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "n1", "STATE": state, "SAID": str(bin / "said"),
    }  # fmt: skip
    line = [str(recipe), *overrides, "--", *command]
    return Command(line, env=environ, cwd=Path.cwd(), target=control)


def supervise(recipe: Path, bin: Path, *command: str, state: str = "") -> tuple[int, str]:
    """Its exit status and output."""
    process = start(recipe, bin, *command, state=state)
    try:
        out, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out


def until(condition) -> None:
    assert in_time(condition)


def requeued(bin: Path) -> bool:
    said = bin / "said"
    return said.exists() and "requeue 7" in said.read_text()


def history(run_dir: Path) -> list[dict]:
    return [
        json.loads(line)
        for line in (run_dir / "attempts.jsonl").read_text().splitlines()
        if line[-1:] == "}"
    ]


def test_a_torn_history_and_a_torn_verdict_do_not_stop_it(recipe, bin, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "VERDICT").write_text("DO")
    (run_dir / "attempts.jsonl").write_text('[1]\n17\n\xff\n{"event": "begin", "attempt": 2, "no')
    status, out = supervise(recipe, bin, "false")
    assert status == 0 and requeued(bin), out
    begin, end = history(run_dir)[-2:]  # neither has become part of the torn line
    assert (begin["event"], end["event"], begin["attempt"], end["verdict"]) == (
        "begin",
        "end",
        1,
        "CRASHED",
    )
    assert History(run_dir).failures() == 1


def test_a_verdict_of_an_unknown_attempt_is_ignored(recipe, bin, tmp_path):
    (tmp_path / "run").mkdir()
    write_verdict(tmp_path / "run", "FATAL", 1, "of last week")
    status, out = supervise(recipe, bin, "false")
    assert status == 0 and requeued(bin), out
    assert "of last week" not in out


def test_two_jobs_of_one_run_are_refused(recipe, bin, tmp_path):
    (tmp_path / "run").mkdir()
    History(tmp_path / "run").append("begin", attempt=1, job="5", nodes=["n1"], step=0)
    write_verdict(tmp_path / "run", "DONE", 1, "the other's")
    status, out = supervise(recipe, bin, "touch", str(tmp_path / "ran"), state="RUNNING")
    assert status == 2 and "job 5 trains" in out and "scancel" in out, out
    assert not (tmp_path / "ran").exists() and len(history(tmp_path / "run")) == 1
    assert read_verdict(tmp_path / "run")[0] == "DONE"
    status, out = supervise(recipe, bin, "touch", str(tmp_path / "ran"), state="NODE_FAIL")
    assert (tmp_path / "ran").exists() and "LOST: the batch script on n1 was lost" in out, out


BAD = "n1 failed twice or more, or by its hardware"
VERDICT = {"step": 0, "reason": "no GPU", "where": "rank 1 on n1", "blamed": "n1"}
BAD_NODE = (
    "sh",
    "-c",
    'printf "FAILED\\n%s\\n" "$0" > "$CLIP_TRAIN_RUN_DIR/VERDICT"; exit 2',
    json.dumps(VERDICT),
)


def blame(run_dir: Path, node: str) -> None:
    """An attempt before this one that failed on a node."""
    run_dir.mkdir()
    end = {"decision": "requeue", "failures": 0}
    History(run_dir).append("end", attempt=1, blamed=[node], **end)


def play(bin: Path, **commands: str) -> None:
    for name, line in commands.items():
        (bin / name).write_text(f"#!/bin/sh\n{line}\n")
        (bin / name).chmod(0o755)


SHOW_JOB = 'echo "JobId=7 Comment=lab 5 [clip-train: attempt 1 from step 0]"; echo "   ExcNodeList=n8 Features=(null)"'
HOSTNAMES = 'for each in $(echo "$3" | tr , " "); do echo $each; done'
SCONTROL = f"""echo "$*" >> "$SAID"
case "$*" in "show job"*) {SHOW_JOB};; "show hostnames"*) {HOSTNAMES};; esac"""


def test_a_node_that_fails_again_is_excluded_by_the_requeue(recipe, bin, tmp_path):
    blame(tmp_path / "run", "n1")
    play(bin, scontrol=SCONTROL, sbatch="true")
    status, out = supervise(recipe, bin, *BAD_NODE)
    assert status == 0 and f"{BAD}: the next attempts exclude it" in out, out
    said = (bin / "said").read_text().splitlines()
    # after the requeue: Slurm takes it for pending jobs only; and what the user has excluded stays
    assert said.index("update JobId=7 ExcNodeList=n8,n1") > said.index("requeue 7")
    comments = [line for line in said if line.startswith("update JobId=7 Comment=")]
    assert comments == [
        "update JobId=7 Comment=lab 5 [clip-train: attempt 2 from step 0]",
        "update JobId=7 Comment=lab 5 [clip-train: attempt 2: FAILED at step 0]",
    ]
    assert said.index(comments[-1]) < said.index("requeue 7")  # whatever becomes of the job
    assert "update JobId=7 StartTime=now+60" in said
    assert history(tmp_path / "run")[-1]["nodes"] == ["n1"]


def test_what_hardware_and_memory_ask_of_the_next_attempt(recipe, bin, tmp_path):
    """A first failure is enough to exclude a node whose GPU has failed."""
    play(bin, scontrol=SCONTROL, sbatch="true")
    said = {**VERDICT, "hardware": True, "room": 3 * 2**29}
    told = f"echo has $CLIP_TRAIN_ACTIVATION_BYTES; {BAD_NODE[2]}"
    _, out = supervise(recipe, bin, "sh", "-c", told, json.dumps(said))
    assert f"{BAD}: the next attempts exclude it" in out and "has inf\n" in out, out
    _, out = supervise(recipe, bin, "sh", "-c", told, json.dumps(VERDICT))
    assert f"has {3 * 2**29}\n" in out, out
    assert "update JobId=7 StartTime=now+120" in (bin / "said").read_text()  # failed twice


def test_a_node_without_which_the_job_cannot_run_is_kept(recipe, bin, tmp_path):
    blame(tmp_path / "run", "n1")
    play(bin, scontrol=SCONTROL, sbatch="echo no such nodes >&2; exit 1")
    status, out = supervise(recipe, bin, *BAD_NODE)
    assert status == 0 and requeued(bin), out
    assert f"{BAD}, but is not excluded" in out and "no such nodes" in out
    assert "ExcNodeList" not in (bin / "said").read_text()


def test_a_requeue_outlasts_an_outage_of_the_controller(recipe, bin, tmp_path):
    """More often than a refusal is tried."""
    outage = "echo 'Unexpected message received for job 7' >&2; exit 1"  # as Slurm 22.05 says
    requeue = f'[ $(grep -c requeue "$SAID") -gt 4 ] || {{ {outage}; }}'
    play(bin, scontrol=f'echo "$*" >> "$SAID"; case "$*" in requeue*) {requeue};; esac')
    status, out = supervise(recipe, bin, "false")
    assert status == 0 and "requeued: " in out, out
    assert out.count("the requeue failed and is tried again in") == 4


def test_a_requeue_refused_by_slurm_ends_with_the_reason(recipe, bin, tmp_path):
    refused = "echo 'Requested operation is presently disabled' >&2; exit 1"
    ping = "echo 'Slurmctld(primary) at n0 is UP'"
    play(bin, scontrol=f'case "$*" in requeue*) {refused};; ping) {ping};; esac')
    status, out = supervise(recipe, bin, "false")
    assert status == 75 and "refuses to requeue the job (Requested operation is presently" in out


def test_the_last_notice_says_that_slurm_refused_the_requeue(recipe, bin, tmp_path):
    play(bin, scontrol='case "$*" in requeue*) echo no >&2; exit 1;; ping) echo is UP;; esac')
    command = f'echo "$VERDICT $STEP $REASON" >> {tmp_path}/notified'
    process = start(recipe, bin, "false", overrides=[f"log.notify={command}"])
    process.communicate(timeout=PATIENCE)
    promised, last = (tmp_path / "notified").read_text().splitlines()
    assert "(requeue: " in promised
    assert last == "FAILED 0 Slurm refuses to requeue the job (no): submit it again to resume"


def test_a_controller_that_is_up_but_overloaded_is_asked_again(recipe, bin, tmp_path):
    overloaded = "echo 'slurm_requeue: Socket timed out on send/recv operation' >&2; exit 1"
    requeue = f'[ $(grep -c requeue "$SAID") -gt 3 ] || {{ {overloaded}; }}'
    ping = "echo 'Slurmctld(primary) at n0 is UP'"
    play(
        bin,
        scontrol=f'echo "$*" >> "$SAID"; case "$*" in requeue*) {requeue};; ping) {ping};; esac',
    )
    status, out = supervise(recipe, bin, "false")
    assert status == 0 and "requeued: " in out, out


def test_each_attempt_gets_a_port_that_is_free(recipe, bin, tmp_path):
    echo = ("sh", "-c", 'echo "port:$MASTER_PORT"; exit 1')
    ports = [int(supervise(recipe, bin, *echo)[1].split("port:")[1].split()[0]) for _ in range(2)]
    assert len(set(ports)) == 2 and all(20000 <= port < 32768 for port in ports)
    wanted = candidates("7.3")
    with socket.create_server(("", wanted[0])):
        assert f"port:{wanted[1]}" in supervise(recipe, bin, *echo)[1]


def test_a_job_that_a_stop_file_stopped_is_no_failure(recipe, bin, tmp_path):
    """Slurm sees the status 0; the verdict says PREEMPTED. Rank 0 has removed the file already."""
    stopped = f'printf \'PREEMPTED\\n{{"step": 3, "reason": "stopped by the file {tmp_path}/run/STOP"}}\\n\''
    status, out = supervise(recipe, bin, "sh", "-c", f"{stopped} > {tmp_path}/run/VERDICT; exit 75")
    assert status == 0 and not requeued(bin), out
    assert history(tmp_path / "run")[-1]["decision"] == "leave"


def test_gpu_hours_and_a_command_at_each_verdict(recipe, bin, tmp_path, monkeypatch):
    """Its failure is a warning."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "3600")
    command = f'echo "$VERDICT $RUN_NAME $STEP" > {tmp_path}/notified; exit 5'
    ranks = ["sh", "-c", "sleep 2; exit 1"]
    process = start(recipe, bin, *ranks, overrides=[f"log.notify={command}"])
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and requeued(bin) and "status 5" in out, out
    assert (tmp_path / "notified").read_text() == "CRASHED run 0\n"
    end = history(tmp_path / "run")[-1]
    assert end["gpu_hours"] >= 2 and end["gpu_hours_lost"] == end["gpu_hours"]  # 3,600 GPUs
    (tmp_path / "run" / "metrics.jsonl").touch()
    told = subprocess.run(
        [sys.executable, "-m", "launcher", "watch", "--once", str(tmp_path / "run")],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert f"GPU-hours: {end['gpu_hours']:,.1f}, lost:" in told.stdout, told


def test_gpu_hours_of_an_attempt_whose_batch_script_was_lost(recipe, bin, tmp_path, monkeypatch):
    """Up to its last line in metrics.jsonl; lost since its last commit."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    begin = {"event": "begin", "attempt": 1, "time": "2026-11-01T12:00:00+0100", "job": "5"}
    line = json.dumps({**begin, "nodes": ["n1", "n2"], "step": 0})
    (run_dir / "attempts.jsonl").write_text(line + "\n")
    (run_dir / "PROGRESS").write_text("40")
    (run_dir / "metrics.jsonl").touch()
    began = calendar.timegm((2026, 11, 1, 11, 0, 0))
    os.utime(run_dir / "PROGRESS", (began, began + 5400))
    os.utime(run_dir / "metrics.jsonl", (began, began + 7200))
    supervise(recipe, bin, "false")
    end = next(line for line in history(run_dir) if line["event"] == "end")
    assert (end["verdict"], end["seconds"]) == ("LOST", 7200)
    assert (end["gpu_hours"], end["gpu_hours_lost"]) == (32, 8)  # 16 GPUs: 2 h, half an hour


def test_the_log_of_the_job_holds_no_token(recipe, bin, tmp_path):
    command = "false -H 'Authorization: Bearer abc123'"
    process = start(recipe, bin, "false", overrides=[f"log.notify={json.dumps(command)}"])
    out, _ = process.communicate(timeout=PATIENCE)
    assert "log.notify: " in out and "Authorization: Bearer REDACTED" in out, out
    assert "abc123" not in out


def test_a_job_array_is_refused(recipe, bin, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    status, out = supervise(recipe, bin, "touch", str(tmp_path / "ran"))
    assert status == 2 and "run.dir=DIR-$s" in out and not (tmp_path / "ran").exists()


def test_what_the_first_rank_that_failed_reports_is_the_reason(recipe, bin, tmp_path):
    status, out = supervise(recipe, bin, *BAD_NODE)
    assert status == 0 and requeued(bin), out
    end = history(tmp_path / "run")[-1]
    assert (end["verdict"], end["reason"], end["blamed"]) == (
        "FAILED",
        "rank 1 on n1: no GPU",
        ["n1"],
    )


def test_a_preemption_whose_save_outlasts_killwait_is_no_failure(recipe, bin, tmp_path):
    """TERM, then KILL while the ranks still save: Slurm's doing, not the first node's."""
    run_dir = tmp_path / "run"
    for number in (1, 2, 3):  # as many as failures end a run
        process = start(recipe, bin, "sh", "-c", SAVING, str(tmp_path / "pid"))
        until((tmp_path / "pid").exists)
        process.terminate()
        until(lambda number=number: len(History(run_dir).of("terminated")) == number)
        process.kill()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        (tmp_path / "pid").unlink()
        process.communicate(timeout=PATIENCE)
    status, out = supervise(recipe, bin, "true")
    assert "GIVING UP" not in out and requeued(bin), out
    ends = [line for line in history(run_dir) if line["event"] == "end"]
    assert [(end["verdict"], end["blamed"], end["failures"]) for end in ends[:3]] == [
        ("PREEMPTED", [], 0)
    ] * 3


def test_the_ranks_are_told_what_an_epoch_has(recipe, bin, tmp_path):
    """Else each of them would list the shards for it."""
    (tmp_path / "0.tar").write_bytes(b"x")
    write_counts(tmp_path, {"0.tar": 600})
    epochs = ["run.steps=null", "run.epochs=2", f"data.train={tmp_path}/0.tar"]
    process = start(recipe, bin, "echo", "ranks:", overrides=epochs)
    assert process.communicate(timeout=PATIENCE)[0].count("ranks: data.num_samples=600\n") == 1


def test_a_command_that_cannot_start_is_a_failed_attempt(recipe, bin, tmp_path):
    status, out = supervise(recipe, bin, "/nowhere/srun")
    assert status == 0 and requeued(bin), out
    assert "/nowhere/srun cannot be started" in out
    assert history(tmp_path / "run")[-1]["event"] == "end"


def test_an_unwritable_run_directory_is_reported_not_requeued(recipe, bin, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "attempts.jsonl").mkdir()  # root may write anywhere, but not into a folder
    status, out = supervise(recipe, bin, "true")
    assert status == 2 and "attempts.jsonl is a folder" in out and "Traceback" not in out, out
    assert not requeued(bin)


def test_ranks_may_write_the_verdict_at_the_same_time(tmp_path):
    code = (
        "import sys; from pathlib import Path; from launcher.runtime.verdict import write_verdict\n"
        "for step in range(300): write_verdict(Path(sys.argv[1]), 'PREEMPTED', step, 'r')"
    )
    line = [sys.executable, "-c", code, str(tmp_path)]
    writers = [
        subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(ROOT)}) for _ in range(3)
    ]
    assert [writer.wait(timeout=PATIENCE) for writer in writers] == [0, 0, 0]
    assert read_verdict(tmp_path) == ("PREEMPTED", {"step": 299, "reason": "r"})
    assert [file.name for file in tmp_path.iterdir()] == ["VERDICT"]


@pytest.mark.parametrize(
    "text", ["", "DONE", "DONE\n{}", 'DONE\n{"step": null, "reason": ""}', "DONE\n[]", "\xff"]
)
def test_a_damaged_verdict_says_nothing(tmp_path, text):
    (tmp_path / "VERDICT").write_bytes(text.encode("latin-1"))
    assert read_verdict(tmp_path) is None


def test_a_run_that_would_start_over_at_each_requeue_is_refused(recipe, bin, tmp_path):
    """Before the ranks start, as `submit` does: sbatch by hand."""
    process = start(
        recipe, bin, "touch", str(tmp_path / "ranks"), overrides=["checkpoint.resume=never"]
    )
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and "set checkpoint.resume=auto" in out, out
    assert not (tmp_path / "ranks").exists() and not requeued(bin)
