"""slurm/train.sbatch on a real Slurm: preempted, out of time, crashed, hung, cancelled. The last loss is that of
the undisturbed run, and attempts.jsonl tells what happened."""

from __future__ import annotations

import os
import signal
import time

import pytest

from launcher.cli import main
from tests.slurm.conftest import STEPS, Job

pytestmark = pytest.mark.slurm


def finished_like(job, uninterrupted) -> None:
    job.wait_for_state("COMPLETED")
    assert job.verdict() == "DONE", job.told()
    assert len(job.losses()) == len(uninterrupted)
    assert job.losses()[-1] == pytest.approx(uninterrupted[-1], rel=1e-5)
    assert job.attempts()[-1]["decision"] == "done"


def test_time_limits_requeue_until_it_is_done(submit, uninterrupted):
    """One minute a time: the signal comes 10 to 40 s after the start, for Slurm looks twice a minute."""
    job = submit("2x1", "--time=1", "--signal=B:USR1@20", overrides=("run.steps=300",))
    job.wait(lambda: len(job.attempts()) >= 2 if (job.run_dir / "attempts.jsonl").exists() else False, "2 attempts")
    job.wait_for_state("COMPLETED", timeout=240)
    assert job.verdict() == "DONE", job.told()
    ends = job.attempts()
    assert [end["verdict"] for end in ends] == ["PREEMPTED"] * (len(ends) - 1) + ["DONE"]
    assert all("USR1" in end["reason"] or "the job's time" in end["reason"] for end in ends[:-1])
    assert len(job.losses()) == 300


def test_preemption_with_a_grace(submit, cluster, uninterrupted):
    """PREEMPTIONS=12 preempts it as often, in a run that is so much longer."""
    times = int(os.environ.get("PREEMPTIONS", "1"))
    job = submit("1x2", "--partition=low", overrides=(f"run.steps={STEPS * max(1, times // 2)}",))
    before = 0
    for _ in range(times):
        job.wait_for_step(before + 5)
        cluster.call(
            "sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true"
        )
        job.wait(lambda: job.verdict() == "PREEMPTED", "preempted")
        job.wait(lambda: job.state() == "PENDING", "requeued")
        before = job.attempts()[-1]["step"]
    job.wait_for_state("COMPLETED")
    ends = job.attempts()
    told = [(end["verdict"], end["decision"]) for end in ends]
    assert told == [("PREEMPTED", "requeue")] * times + [("DONE", "done")]
    assert all("SIGTERM" in end["reason"] for end in ends[:-1])
    if times == 1:
        finished_like(job, uninterrupted)


def test_power_loss_of_a_node(submit, cluster, uninterrupted):
    job = submit("2x1", "--nodelist=n[2-3]")  # the batch script on n2, the other rank on n3
    job.wait_for_step(8)  # a checkpoint is at 7
    cluster.setup("crash", "n3")
    try:
        job.wait(lambda: job.state() == "PENDING", "requeued by Slurm", 60)
        cluster.setup("up", "3")
        finished_like(job, uninterrupted)
    finally:
        cluster.setup("up", "3")
    assert job.attempts()[0]["blamed"] == ["n3"], job.told()


def test_power_loss_of_the_node_with_the_batch_script(submit, cluster, uninterrupted):
    job = submit("1x2", "--nodelist=n3")
    job.wait_for_step(8)  # a checkpoint is at 7
    cluster.setup("crash", "n3")
    try:
        job.wait(lambda: job.state() == "PENDING", "requeued by Slurm", 60)
        cluster.setup("up", "3")
        finished_like(job, uninterrupted)
    finally:
        cluster.setup("up", "3")
    ends = job.attempts()
    assert [end["verdict"] for end in ends] == ["LOST", "DONE"]
    assert ends[0]["blamed"] == ["n3"]


def test_kill_of_a_rank_ends_the_others_and_the_run_goes_on(submit, uninterrupted):
    job = submit("2x1")
    job.wait_for_step(8)  # a checkpoint is at 7
    ranks = job.rank_pids()
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    job.wait(lambda: not os.path.exists(f"/proc/{ranks[0]}"), "the other rank's end", 30)
    assert time.monotonic() - began < 30
    finished_like(job, uninterrupted)
    first = job.attempts()[0]
    assert (first["verdict"], first["decision"], first["blamed"]) == (first["verdict"], "requeue", ["n2"])
    assert "rank 1 on n2 was ended from outside: Killed" in first["reason"]
    assert job.told().count("was ended from outside") == 1  # once, at the end of the attempt's log


def test_scancel_is_honoured(submit):
    job = submit("1x2")
    job.wait_for_step(10)
    job.cluster.call("scancel", job.number)
    job.wait_for_state("CANCELLED", timeout=60)
    time.sleep(8)  # longer than a requeued job would wait
    assert job.state() == "CANCELLED"
    (end,) = job.attempts()
    assert (end["verdict"], end["decision"]) == ("PREEMPTED", "leave"), job.told()
    assert end["step"] >= 10  # committed all the same


def test_a_crash_loop_gives_up(submit):
    job = submit("2x1", FAULT="die")
    job.wait_for_state("FAILED")
    assert [end["decision"] for end in job.attempts()] == ["requeue", "requeue", "give up"], job.told()
    assert job.verdict() == "FAILED"
    assert "GIVING UP: 3 failures in a row without a new checkpoint" in job.told()


def test_a_hung_rank_is_found(submit, uninterrupted):
    job = submit("2x1", overrides=("launch.hang_step_seconds=6",))
    job.wait_for_step(8)  # a checkpoint is at 7
    os.kill(job.rank_pids()[1], signal.SIGSTOP)
    finished_like(job, uninterrupted)
    first = job.attempts()[0]
    assert first["blamed"] == ["n2"] and first["decision"] == "requeue", job.told()
    assert "rank 1 on n2 hangs" in first["reason"]
    assert "waiting in" in job.told() and "Current thread" in job.told()  # the stacks of the one that waited


def test_a_bad_node_is_left_out(submit, uninterrupted):
    job = submit("2x1", FAULT="bad:n2")
    finished_like(job, uninterrupted)
    ends = job.attempts()
    assert [end["blamed"] for end in ends] == [["n2"], ["n2"], []], job.told()
    assert "n2 failed 2 times: left out of the next attempt" in job.told()


def test_a_stop_file_stops_and_is_not_requeued(submit):
    job = submit("1x2")
    job.wait_for_step(5)
    (job.run_dir / "STOP").touch()
    job.wait_for_state("FAILED", timeout=60)  # status 75
    (end,) = job.attempts()
    assert (end["verdict"], end["decision"]) == ("PREEMPTED", "leave")


def test_a_mistake_is_not_tried_again(submit):
    job = submit("1x2", overrides=("engine.ds_config=zero9",))
    job.wait_for_state("FAILED", timeout=60)
    (end,) = job.attempts()
    assert (end["verdict"], end["decision"]) == ("FATAL", "stop"), job.told()
    assert "engine.ds_config (zero9)" in end["reason"]


def test_torchrun_on_each_node(submit, uninterrupted):
    job = submit("2x1", "torchrun.sbatch", RANKS_PER_NODE="1")
    job.wait_for_step(10)
    job.cluster.warn(job.number)
    finished_like(job, uninterrupted)
    assert [end["verdict"] for end in job.attempts()] == ["PREEMPTED", "DONE"], job.told()
    assert "SIGUSR1" in job.attempts()[0]["reason"]


def test_a_chain_goes_on_and_its_rest_is_cancelled(submit, uninterrupted):
    job = submit("1x2", "chain.sbatch", "--array=1-4%1")
    job.wait_for_step(10)
    job.cluster.warn(f"{job.number}_1")
    job.wait(lambda: job.cluster.call("squeue", "-h", "-o", "%i") == "", "the chain's end")
    assert job.verdict() == "DONE", job.told()
    assert job.losses()[-1] == pytest.approx(uninterrupted[-1], rel=1e-5)
    assert [(end["verdict"], end["decision"]) for end in job.attempts()] == [("PREEMPTED", "requeue"), ("DONE", "done")]


def test_submit(cluster, submit, tmp_path, data, monkeypatch, capsys, uninterrupted):
    """The real verb: the job runs the frozen code, not the one here; and a second submission is refused."""
    (tmp_path / "site.yaml").write_text("{gpus_per_node: 0, cpus_per_task: 1, warn_seconds: 20, local_paths: []}\n")
    monkeypatch.setenv("SLURM_CONF", str(cluster.lab / "slurm.conf"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    line = ["submit", str(tmp_path / "recipe.yaml"), f"run.steps={STEPS}", "--site", str(tmp_path / "site.yaml")]
    line += ["--nodes=2", "--tasks-per-node=1", "--time=10"]
    assert main(line) == 0
    number = capsys.readouterr().out.split()[1].rstrip(":")
    folder = tmp_path / "run" / "submit" / "0001"
    job = Job(cluster, number, tmp_path / "run", folder / f"small-{number}.log")
    try:
        assert main(line) == 2
        assert f"job {number} is queued or running" in capsys.readouterr().err
        job.wait_for_step(3)
        ranks = job.rank_pids()
        assert {os.readlink(f"/proc/{pid}/cwd") for pid in ranks.values()} == {str(folder / "code")}
        finished_like(job, uninterrupted)
    finally:
        cluster.call("scancel", number)
