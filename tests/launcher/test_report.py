"""`clip-train report`, and the lines that every verb logs."""

import logging
import re
import signal
import sys
import time

import pytest

from launcher.cli.main import main, parse
from launcher.cli.options import VERBS
from tests.launcher.conftest import PATIENCE, metrics, run, start
from tests.metrics.pages import Page, write_run

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[rank (\d+)\] (debug|info|warning|error): (.*)")


def test_report_renders_a_run_anew(tmp_path, capsys):
    one = write_run(tmp_path / "one")
    assert main(["report", str(one)]) == 0
    assert "step 120 of 200" in Page((one / "report.html").read_text()).text
    (said,) = capsys.readouterr().err.splitlines()
    assert LINE.fullmatch(said).groups() == ("0", "info", f"written: {one / 'report.html'}")
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.engine
def test_a_run_reports_itself(recipe, data):
    """Killed and resumed: the page has both attempts, what differs from the defaults, and all steps."""
    process = start(recipe, "run.steps=30", "log.progress=true")
    folder = recipe.parent / "run"
    end = time.monotonic() + PATIENCE
    while not (folder / "report.html").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    while not (folder / "PROGRESS").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    status, out = run(recipe, "run.steps=30", f"data.val={data.val}", ranks=2)
    assert status == 0, out
    page = Page((folder / "report.html").read_text())
    assert "DONE" in page.sections[""] and "step 30 of 30 (100.0%)" in page.sections[""]
    assert (
        "PREEMPTED stopped by SIGTERM" in page.sections["Attempts"]
        and "2 ranks on cpu" in page.sections["Attempts"]
    )
    assert "optim.lr 0.001" in page.sections["What differs from the defaults"]
    assert "optim.weight_decay" not in page.sections["What differs from the defaults"]
    assert page.sections["Latest evaluations"]
    assert "torch 2" in page.sections["What it ran with"]
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


def test_a_tracker_without_its_package_is_a_mistake_before_training(recipe, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", str(recipe), "--dry-run", "log.wandb=true"]) == 2
    assert "log.wandb (true): wandb is not installed; pip install wandb" in capsys.readouterr().err
    assert not (recipe.parent / "run").exists()
