import io
import logging
import sys

import pytest

from clip_train.metrics.progress import ProgressLine, format_seconds


def record(step: int) -> dict:
    return {
        "step": step,
        "loss": 2.5,
        "samples_per_second": 1234.5,
        "step_seconds": 2.0,
        "data_wait_seconds": 0.5,
    }


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_plain_lines_come_by_time_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    progress = ProgressLine(100, clock=lambda: now[0])
    for step in range(1, 101):
        progress.after_step(record(step))
        now[0] += 1.0
    text = caplog.messages
    assert [int(line.split()[1].split("/")[0]) for line in text] == [*range(1, 100, 10), 100]
    assert text[1] == "step 11/100  loss 2.5000  1,234 samples/s  data wait 25%  ETA 0:02:58"


def test_an_evaluation_is_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    """Of many numbers it shows those that one looks for; the file has the others."""
    retrieval = {f"image_to_text_R@{k}": k / 20 for k in (1, 5, 10)}
    others = {f"number_{i}": float(i) for i in range(20)}
    evaluated = {"step": 7, "zero_shot_top1": 0.25, **retrieval, **others, "val_loss": 1.5}
    ProgressLine(100).after_evaluate(evaluated)
    (line,) = caplog.messages
    assert line == (
        "step 7: zero-shot top-1 25.00%  image-to-text R@1 5.00%  val_loss 1.5"
        "  (and 22 more in eval.jsonl)"
    )


def test_the_first_step_does_not_count_in_the_eta(caplog: pytest.LogCaptureFixture) -> None:
    """It holds the start of workers, allocators, compiled kernels."""
    progress = ProgressLine(12, every_seconds=0.0)
    progress.after_step(record(1) | {"step_seconds": 600.0})
    progress.after_step(record(2) | {"step_seconds": 3.0})
    assert [line.split("ETA ")[1] for line in caplog.messages] == ["...", "0:00:30"]


def test_what_became_of_saves_stays_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    progress = ProgressLine(100, every_seconds=2.0, clock=lambda: now[0])
    failed = {"checkpoint_failures": 0}
    for step, more in (
        (2, {}),
        (3, {"checkpoint_step": 3} | failed),  # a step without a line
        (4, {}),
        (6, {"checkpoint_failures": 1}),
        (8, {"checkpoint_failures": 2}),
        (10, {"checkpoint_step": 9} | failed),
    ):
        now[0] = step
        progress.after_step(record(step) | more)
    ends = [line.split("ETA ")[1].split(maxsplit=1)[1:] for line in caplog.messages]
    saved = "saved at 3"
    assert ends == [
        [],
        [saved],
        [f"{saved}  1 failed save"],
        [f"{saved}  2 failed saves"],
        ["saved at 9"],
    ]


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    progress = ProgressLine(4, start_step=1)
    for step in (2, 3, 4):
        progress.after_step(record(step))
    print("saved [bold]", file=sys.stderr)  # as the log does
    progress.phase("end")
    assert sys.stderr is out
    for text in ("4/4", "loss 2.5000", "saved [bold]"):
        assert text in out.getvalue()


def test_format_seconds() -> None:
    assert [format_seconds(s) for s in (0.4, 3723, 2 * 86400 + 3723)] == [
        "0:00:00",
        "1:02:03",
        "2d 01:02:03",
    ]
