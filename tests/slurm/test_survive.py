"""slurm/train.sbatch on a real Slurm: preempted, out of time, crashed, hung, cancelled. Checkpoints
go to a real S3 server, and what a node keeps on its own disk is gone after every attempt. Every
step's loss is the undisturbed run's, and attempts.jsonl tells what happened. A test's docstring is
its name in benchmarks/results/survive.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time

import pytest

from launcher.cli.main import main
from launcher.runtime.environment import candidates
from tests.slurm.cluster import Job
from tests.slurm.conftest import MANY_STEPS, OVERRIDES, write_recipe
from tests.slurm.evidence import ANY, check_story, finished_like

pytestmark = pytest.mark.slurm

DONE = ("DONE", "done", [])
PREEMPTED = ("PREEMPTED", "requeue", [])
PREEMPTIONS = int(os.environ.get("PREEMPTIONS", "1"))


def test_preemption_with_a_grace(submit, cluster, undisturbed):
    """preempted by a higher partition, with a grace"""
    length = {"steps": MANY_STEPS, "STEP_SECONDS": "0.5"} if PREEMPTIONS > 3 else {}
    job = submit("1x2", "--partition=low", "--nodelist=n3", hold=True, **length)
    before = 0
    for number in range(1, PREEMPTIONS + 1):
        job.wait_for_step(before + 5)
        higher = (
            "--partition=high",
            "--nodelist=n3",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=true",
        )
        cluster.call("sbatch", "--parsable", *higher)
        job.wait_for_attempts(number)
        before = job.attempts()[-1]["step"]
    job.let_go()
    finished_like(job, undisturbed)
    story = check_preempted(job, PREEMPTIONS)
    assert all("SIGTERM" in each.end["reason"] for each in story[:-1])


def test_preemption_under_fsdp(submit, cluster, undisturbed):
    """the same, `engine.kind: fsdp`"""
    job = submit(
        "1x2",
        "--partition=low",
        "--nodelist=n3",
        hold=True,
        overrides=("engine.kind=fsdp", "engine.zero_stage=3"),
    )
    job.wait_for_step(5)
    cluster.call(
        "sbatch",
        "--parsable",
        "--partition=high",
        "--nodelist=n3",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=true",
    )
    job.wait_for_attempts(1)
    job.let_go()
    finished_like(job, undisturbed)  # whose engine is DeepSpeed
    check_preempted(job, 1)


def check_preempted(job, times):
    """At least so often: Slurm may start the job again before the higher one."""
    preemptions = len(job.attempts()) - 1
    assert preemptions >= times
    return check_story(job, *[PREEMPTED] * preemptions, DONE)


def test_power_loss_of_a_node(submit, cluster, undisturbed):
    """power loss of a node"""
    job = submit(
        "2x1", "--nodelist=n[2-3]", hold=True
    )  # the batch script on n2, the other rank on n3
    job.wait_for_commit()
    cluster.crash("n3")
    job.let_go()
    try:
        job.wait(lambda: job.state() == "PENDING", "requeued by Slurm")
        cluster.repair(job.number)
        finished_like(job, undisturbed)
    finally:
        cluster.repair()
    # Slurm requeues it, or, where the other rank was quicker to notice than Slurm, the batch script
    check_story(job, (ANY, ANY, ANY), DONE)


def test_power_loss_of_the_node_with_the_batch_script(submit, cluster, undisturbed):
    """power loss of the node with the batch script"""
    job = submit("1x2", "--nodelist=n3", hold=True)
    job.wait_for_commit()
    cluster.crash("n3")
    job.let_go()
    try:
        job.wait(lambda: job.state() == "PENDING", "requeued by Slurm")
        cluster.repair(job.number)
        finished_like(job, undisturbed)
    finally:
        cluster.repair()
    check_story(job, ("LOST", "requeue", ["n3"]), DONE)


def test_kill_of_a_rank_ends_the_others_and_the_run_goes_on(submit, undisturbed):
    """kill -9 of a rank"""
    job = submit("2x1", "--nodelist=n[1-2]", hold=True)
    job.wait_for_commit()
    ranks = job.rank_pids()
    os.kill(ranks[1], signal.SIGKILL)
    job.let_go()
    job.wait(lambda: not os.path.exists(f"/proc/{ranks[0]}"), "the other rank's end")
    assert (
        "no progress for" not in job.told()
    )  # it has learnt of the death, and not waited for the watchdog
    finished_like(job, undisturbed)
    first, _ = check_story(job, (ANY, "requeue", ["n2"]), DONE)
    assert re.match("rank 1 on n2 has died or is frozen", first.end["reason"])
    lines = [line for line in job.told().splitlines() if first.end["reason"] in line]
    assert sum("attempt 1 ended" in line for line in lines) == 1
    assert len(lines) == 2  # and once by the rank that has noticed


def test_scancel_is_honoured(submit):
    """scancel"""
    job = submit("1x2", hold=True)
    job.wait_for_step(10)
    job.cluster.call("scancel", job.number)
    job.wait_for_attempts(1)
    job.wait_for_state("CANCELLED")
    time.sleep(8)  # longer than a requeued job would wait
    assert job.state() == "CANCELLED"
    (only,) = check_story(job, ("PREEMPTED", "leave", []))
    assert only.end["step"] >= 10  # committed all the same
    assert job.newest_commit() == only.end["step"]


def test_a_crash_loop_gives_up(submit):
    """every rank 1 dies at its start"""
    job = submit("2x1", "--nodelist=n[1-2]", FAULT="die")
    job.wait_for_state("FAILED")
    story = check_story(job, (ANY, "requeue", ANY), (ANY, "requeue", ANY), (ANY, "give up", ANY))
    assert [each.end["failures"] for each in story] == [1, 2, 3]
    assert job.verdict() == "FAILED"
    assert "GIVING UP: 3 failures in a row without a new checkpoint" in job.told()


def test_a_frozen_rank_is_found(submit, undisturbed):
    """a rank that is frozen (SIGSTOP), found by its heartbeat"""
    job = submit("2x1", "--nodelist=n[1-2]", hold=True)
    job.wait_for_commit()
    os.kill(job.rank_pids()[1], signal.SIGSTOP)
    job.let_go()
    finished_like(job, undisturbed)
    first, _ = check_story(job, (ANY, "requeue", ["n2"]), DONE)
    assert "rank 1 on n2 has died or is frozen" in first.end["reason"]


def test_a_node_that_fails_twice_is_excluded(submit, undisturbed):
    """a node without its GPU, excluded by the requeue"""
    job = submit("2x1", FAULT="bad:n2")  # Slurm takes n1 and n2
    finished_like(job, undisturbed)
    bad = (ANY, "requeue", ["n2"])
    story = check_story(job, bad, bad, DONE)
    assert "rank 1 on n2: LOCAL_RANK (0) has no GPU" in story[1].end["reason"]
    shown = job.cluster.call("scontrol", "show", "job", job.number)
    assert "ExcNodeList=n2" in shown


def test_the_controller_is_away_when_an_attempt_ends(submit, cluster, undisturbed):
    """slurmctld away when an attempt ends"""
    job = submit("1x2", hold=True)
    job.wait_for_step(10)
    with cluster.controller_away():
        for pid in job.rank_pids().values():
            os.kill(pid, signal.SIGUSR1)
        # more often than a refusal is tried
        job.wait(
            lambda: job.told().count("the requeue failed and is tried again") > 3, "asked again"
        )
    job.let_go()
    finished_like(job, undisturbed)
    check_story(job, PREEMPTED, DONE)


def test_a_port_that_is_taken_costs_no_attempt(submit, cluster, undisturbed):
    """the next attempt's port taken by a stranger"""
    job = submit("2x1", "--nodelist=n[1-2]", hold=True)
    job.wait_for_step(10)
    first, second, *_ = candidates(f"{job.number}.2")
    with cluster.taken_port("n1", first):
        job.warn()
        job.wait_for_attempts(1)
        job.let_go()
        finished_like(job, undisturbed)
    check_story(job, PREEMPTED, DONE)
    assert f"through n1:{second}" in job.told()


def test_what_submit_writes_is_what_sbatch_reads(cluster, tmp_path, data, monkeypatch, capsys):
    """A comment with quotes, a log's path with a percent sign and a space, a bare option."""
    site = {"gpus_per_node": 0, "cpus_per_task": 1, "warn_seconds": 20, "local_paths": []}
    site["sbatch"] = {"comment": 'a "b" \\ c', "exclusive": True}
    (tmp_path / "site.yaml").write_text(json.dumps(site))
    monkeypatch.setenv("SLURM_CONF", str(cluster.lab / "slurm.conf"))
    line = ["submit", str(write_recipe(tmp_path, data)), f"run.dir={tmp_path}/100% mine"]
    line += ["--site", str(tmp_path / "site.yaml"), "--tasks-per-node=1", "--time=10"]
    assert main([*line, "--dry-run", "--", "--begin", "now+1hour"]) == 0
    assert main([*line, "--dry-run", "--", "--constraint=nowhere"]) == 2
    assert "sbatch --test-only refuses this script" in capsys.readouterr().err
    assert main([*line, "--", "--begin", "now+1hour"]) == 0
    number = capsys.readouterr().out.split()[1].rstrip(":")
    try:
        shown = cluster.call("scontrol", "show", "job", number)
    finally:
        cluster.call("scancel", number)
    assert 'Comment=a "b" \\ c' in shown and "OverSubscribe=NO" in shown
    assert f"StdOut={tmp_path}/100% mine/submit/0001/small-{number}.log" in shown.replace("%%", "%")


def test_a_job_array_is_refused(submit):
    """a job array"""
    job = submit("1x2", "--array=1-2")
    job.wait(job.gone, "the end of the array")
    assert job.told().count("run.seed=$s") == 2 and not job.attempts()


def test_a_stop_file_stops_and_is_not_requeued(submit):
    """a STOP file"""
    job = submit("1x2", hold=True)
    job.wait_for_step(5)
    (job.run_dir / "STOP").touch()
    job.wait_for_state("COMPLETED")
    check_story(job, ("PREEMPTED", "leave", []))


def test_a_mistake_is_not_tried_again(submit):
    """a mistake in the recipe"""
    job = submit("1x2", overrides=("engine.ds_config=zero9",))
    job.wait_for_state("FAILED")
    (only,) = check_story(job, ("FATAL", "stop", []))
    assert "engine.ds_config (zero9)" in only.end["reason"]


def test_torchrun_on_each_node(submit, undisturbed):
    """USR1 to torchrun on each node"""
    job = submit("2x1", "torchrun.sbatch", hold=True, RANKS_PER_NODE="1")
    job.wait_for_step(10)
    job.warn()
    job.wait_for_attempts(1)
    job.let_go()
    finished_like(job, undisturbed)
    first, _ = check_story(job, PREEMPTED, DONE)
    assert "SIGUSR1" in first.end["reason"]


def test_submit(cluster, tmp_path, data, monkeypatch, capsys, undisturbed):
    """The real verb: the job runs the frozen code."""
    (tmp_path / "site.yaml").write_text(
        "{gpus_per_node: 0, cpus_per_task: 1, warn_seconds: 20, local_paths: []}\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(cluster.lab / "slurm.conf"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    line = ["submit", str(write_recipe(tmp_path, data)), f"run.steps={MANY_STEPS}", *OVERRIDES]
    line += ["--site", str(tmp_path / "site.yaml"), "--nodes=2", "--tasks-per-node=1", "--time=10"]
    with cluster.paused():
        assert main(line) == 0
        number = capsys.readouterr().out.split()[1].rstrip(":")
    folder = tmp_path / "run" / "submit" / "0001"
    job = Job(cluster, number, tmp_path / "run", folder / f"small-{number}.log", "2x1", MANY_STEPS)
    try:
        places: set[str] = set()

        def seen() -> bool:
            with contextlib.suppress(OSError):  # one that has just ended
                places.update(os.readlink(f"/proc/{pid}/cwd") for pid in job.rank_pids().values())
            return bool(places)

        job.wait(seen, "running")
        assert places == {str(folder / "code")}
        finished_like(job, undisturbed)
    finally:
        cluster.call("scancel", number)


def test_time_limits_requeue_until_it_is_done(out_of_time, undisturbed):
    """a time limit of two minutes"""
    job = out_of_time
    job.wait(job.gone, "the job's end", 3000)
    finished_like(job, undisturbed)
    requeues = len(job.attempts()) - 1
    assert requeues >= 2
    story = check_story(job, *[PREEMPTED] * requeues, DONE)
    assert all(
        "USR1" in each.end["reason"] or "the job's time" in each.end["reason"]
        for each in story[:-1]
    )
