"""`clip-train report`, `clip-train watch`, and the lines that every verb logs."""

import json
import logging
import os
import pty
import re
import signal
import sys
import time

import pytest

from launcher.cli.main import VERBS, main, parse
from tests.launcher.conftest import ENDLESS, PATIENCE, metrics, run, start
from tests.metrics.pages import Page, evaluation, step, write_jsonl, write_run

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[rank (\d+)\] (debug|info|warning|error): (.*)")


def test_report_renders_a_run_anew(tmp_path, capsys):
    one = write_run(tmp_path / "one")
    assert main(["report", str(one)]) == 0
    assert "step 120 of 200" in Page((one / "report.html").read_text()).text
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"written: {one / 'report.html'}"
    assert main(["report", str(tmp_path)]) == 2
    assert "has no run" in capsys.readouterr().err
    assert main(["report", "http://me:planted@127.0.0.1:1/run"]) == 2
    err = capsys.readouterr().err
    assert "http://REDACTED@127.0.0.1:1/run has no run" in err and "planted" not in err


def test_watch_once_shows_what_matters(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    folder = write_run(tmp_path / "run")
    assert main(["watch", str(folder), "--once"]) == 0
    out = capsys.readouterr().out
    for text in ("run  training  step 120 of 200  0:00:40 left  last step 0:00:0", "ok: no problems",
                 "learning rate", "logit scale", "gradient norm",
                 "attempt 2 from step 60", "PREEMPTED, stopped by SIGTERM", "zero-shot top-1",
                 "50.00%  best 50.00% @120"):  # fmt: skip
        assert text in out, out
    assert max(map(len, out.splitlines())) <= 120
    (folder / "VERDICT").write_text(
        'FAILED\n{"step": 120, "reason": "rank 1 on n2: a node has gone"}\n'
    )
    assert main(["watch", str(folder)]) == 0  # what is no terminal is shown it once
    assert "error: FAILED: rank 1 on n2: a node has gone" in capsys.readouterr().out


def test_watch_shows_several_runs_and_their_gpu_hours(tmp_path, capsys):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    ends = [
        {"event": "end", "attempt": 1, "step": 60, "gpu_hours": 16.0, "gpu_hours_lost": 2.5},
        {"event": "end", "attempt": 2, "step": 120, "gpu_hours": 8.0, "gpu_hours_lost": 0.0},
    ]
    with (one / "attempts.jsonl").open("a") as file:
        file.write("".join(json.dumps(end) + "\n" for end in ends))
    assert main(["watch", str(one), str(two), "--once"]) == 0
    first, second = capsys.readouterr().out.split("two  training  step 120 of 200")
    assert first.startswith("one  training  step 120 of 200")
    assert "GPU-hours: 24.0, lost: 2.5" in first and "GPU-hours" not in second


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_watch_shows_twelve_sets_in_any_width(tmp_path, capsys, monkeypatch, width):
    """A table where it fits, else a list; no number is cut."""
    monkeypatch.setenv("COLUMNS", str(width))
    folder = write_run(tmp_path / "run")
    names = [f"set-{i}-with-a-name-of-sixty-characters-as-somebody-made-it-up" for i in range(12)]
    records = [evaluation(60, names, 0.5), evaluation(120, names, 0.4)]
    write_jsonl(folder / "eval.jsonl", records)
    metrics_of_all = [
        step(i, mfu=0.4567, mfu_computed=0.3456, rounds=1 + (i == 7)) for i in range(1, 121)
    ]
    write_jsonl(folder / "metrics.jsonl", metrics_of_all)
    assert main(["watch", str(folder), "--once"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
    for value in ("40.00%", "36.00%", "1.6", "50.00% @60", "45.00% @60", "1.5 @60"):
        assert out.count(value) >= 12, (value, out)
    assert "45.67" in out and "34.56" in out
    assert "steps computed twice: 1 of 120" in out
    assert "R@5" not in out and "dedup" not in out
    if width >= 80:  # a line or a few for each set, and not one for each number
        assert len(out.splitlines()) < 30 + 4 * 12


@pytest.mark.engine
def test_watch_knows_that_a_run_was_killed(recipe, capsys):
    """At once, on the machine where it ran; the processes are gone and no verdict was written."""
    process = start(recipe, *ENDLESS)
    folder = recipe.parent / "run"
    end = time.monotonic() + PATIENCE
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert main(["watch", str(folder), "--once"]) == 0
    out = capsys.readouterr().out
    assert "run  training  step " in out and "ago" in out and "ended" not in out, out
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert main(["watch", str(folder), "--once"]) == 0
    out = capsys.readouterr().out
    assert "run  ended  step " in out and "no problems" not in out and " left" not in out, out
    unwrapped = " ".join(out.split())
    assert re.search(
        r"error: ended without a verdict: process \d+ .* last step 0:0\d:\d\d ago", unwrapped
    ), out
    assert main(["report", str(folder)]) == 0
    assert "state ended" in (folder / "report.html").read_text()


def test_watch_cuts_no_line_in_a_pipe(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = write_run(tmp_path / "run")
    reason = "rank 1 on n2: " + "a node has gone, " * 20 + "at the end"
    (folder / "VERDICT").write_text("FAILED\n" + json.dumps({"step": 120, "reason": reason}))
    assert main(["watch", str(folder), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("error: ") and line.endswith("at the end") for line in lines)


def test_watch_follows_a_run_in_a_terminal_until_ctrl_c(tmp_path):
    folder = write_run(tmp_path / "run")
    child, terminal = pty.fork()
    if child == 0:  # a terminal of its own: nothing of pytest's is used or ended here
        os.environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        os.execv(sys.executable, [sys.executable, "-m", "launcher", "watch", str(folder)])
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + PATIENCE
        while text not in seen:
            assert time.monotonic() < end, seen[-2000:]
            seen += os.read(terminal, 65536)

    until(b"120 of")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(121)) + "\n")
    until(b"121 of")
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(terminal)


@pytest.mark.engine
def test_a_run_reports_itself(recipe, data):
    """Killed and resumed: the page has both attempts, what differs from the defaults, and all steps."""
    process = start(recipe, "run.steps=30", "log.progress=true")
    folder = recipe.parent / "run"
    end = time.monotonic() + PATIENCE
    while not (folder / "PROGRESS").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    status, out = run(recipe, "run.steps=30", f"data.val={data.val}", ranks=2)
    assert status == 0, out
    page = Page((folder / "report.html").read_text())
    assert "DONE" in page.sections[""] and "step 30 of 30" in page.sections[""]
    assert (
        "PREEMPTED stopped by SIGTERM" in page.sections["Attempts"]
        and "2 ranks on cpu" in page.sections["Attempts"]
    )
    assert "optim.lr 0.001" in page.sections["What differs from the defaults"]
    assert "optim.weight_decay" not in page.sections["What differs from the defaults"]
    assert "samples" in page.sections["Scores"] and "R@1" in page.sections["Scores"]
    assert "own caption" in page.sections["Validation images"]
    assert sum(each.startswith("data:image/jpeg") for each in page.addresses) == 6
    facts = page.sections["What ran"]
    assert "torch 2" in facts and "2 ranks x" in facts and "parameters" in facts
    assert "samples seen 960" in facts
    assert len(metrics(folder)) == 30
    lines = [LINE.match(line) for line in out.splitlines()]
    assert {line[1] for line in lines if line} == {"0"} and any(
        line and "step 30/30  loss" in line[3] for line in lines
    )


@pytest.mark.engine
def test_quiet_leaves_warnings_and_errors(recipe):
    status, out = run(recipe, "--quiet", "run.steps=2", "schedule.warmup_steps=0")
    assert status == 0 and "info:" not in out and "step 2/2" not in out, out
    status, out = run(recipe, "--quiet", "optim.lr=-1")
    assert status == 2 and out.count("error: ") == 1, out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_can_be_quiet_or_verbose(verb, capsys):
    with pytest.raises(SystemExit):
        parse([verb, "--help"])
    assert {"--quiet", "--verbose"} <= set(re.findall(r"--\w+", capsys.readouterr().out))


def test_both_packages_log_alike(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    for line, levels in ((["--verbose"], 4), ([], 3), (["--quiet"], 2)):
        assert main(["keys", "optim.lr", *line]) == 0
        for name in ("clip_train.storage", "launcher"):
            capsys.readouterr()
            for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
                logging.getLogger(name).log(level, "of %s", "it")
            said = [LINE.fullmatch(line).groups() for line in capsys.readouterr().err.splitlines()]
            assert said == [
                ("3", each, "of it") for each in ("debug", "info", "warning", "error")[4 - levels :]
            ]


def test_a_tracker_without_its_package_stops_before_training(recipe, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", str(recipe), "--dry-run", "log.wandb=true"]) == 2
    assert "log.wandb (true): wandb is not installed; pip install wandb" in capsys.readouterr().err
    assert not (recipe.parent / "run").exists()
