import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from clip_train import dist
from clip_train.errors import ClipTrainError
from clip_train.metrics.config import LogConfig
from clip_train.metrics.jsonl import JsonlSink, iter_jsonl, truncate_jsonl
from clip_train.metrics.sinks import Sinks
from tests.ranks import run_ranks


def lines(path: Path) -> list[dict]:
    """Strict JSON: a bare NaN is an error."""

    def refuse(token: str) -> None:
        raise AssertionError(f"bare {token}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_line_is_there_at_once_with_every_digit(tmp_path: Path) -> None:
    path, value = tmp_path / "m.jsonl", 0.1 + 0.2
    sink = JsonlSink(path)
    sink.write({"step": 1, "loss": value, "tensor": torch.tensor(0.5), "text": "é"})
    assert lines(path) == [
        {"step": 1, "loss": value, "tensor": 0.5, "text": "é"}
    ]  # before any close
    sink.write({"step": 2, "loss": math.nan, "grad_norm": math.inf})
    sink.close()
    assert lines(path)[1] == {"step": 2, "loss": None, "grad_norm": None}


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda run: run.rename(run.with_name("moved"))])
def test_a_run_directory_that_goes_away_ends_the_run(tmp_path: Path, lose: Callable) -> None:
    sink = JsonlSink(tmp_path / "run" / "m.jsonl")
    sink.write({"step": 1})
    lose(tmp_path / "run")
    with pytest.raises(ClipTrainError, match=r"m.jsonl was removed or moved .* put run.dir back"):
        sink.write({"step": 2})
    sink.close()


@pytest.mark.parametrize("torn", ["", '{"step": 8, "lo', '{"step": 3, "lo', "\0\0\0"])
def test_resume_drops_what_the_checkpoint_does_not_know(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"step": {s}, "loss": {s / 7!r}}}\n' for s in range(1, 8)) + torn)
    sink = JsonlSink(path, resume_step=4)
    assert [r["step"] for r in lines(path)] == [1, 2, 3, 4]
    sink.write({"step": 5, "loss": 9.0})
    sink.close()
    assert [(r["step"], r["loss"]) for r in lines(path)] == [
        *((s, s / 7) for s in range(1, 5)),
        (5, 9.0),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("step", [0, 1, 2, 1234, 2999, 3000])
@pytest.mark.parametrize("torn", ["", '{"step": 3001, "text": "' + 70_000 * "x"])
def test_resume_of_a_long_run(tmp_path: Path, step: int, torn: str) -> None:
    """Longer than what is read at once, with lines that end on its edges and beside them."""
    path = tmp_path / "m.jsonl"
    whole = [json.dumps({"step": s, "text": "y" * (s % 67)}) + "\n" for s in range(1, 3001)]
    whole[1] = json.dumps({"step": 2, "text": "z" * 200_000}) + "\n"
    path.write_text("".join(whole) + torn)
    truncate_jsonl(path, step)
    assert path.read_text() == "".join(whole[:step])


def test_a_resume_keeps_one_line_of_each_step(tmp_path: Path) -> None:
    """Two starts overlapped, and one was killed within a line."""
    path = tmp_path / "m.jsonl"
    first, second = ([f'{{"step": {s}, "of": "{of}"}}\n' for s in range(1, 7)] for of in "ab")
    path.write_text("".join([*first[:3], second[0], first[3][:9] + "\n", *second[1:], first[3]]))
    truncate_jsonl(path, 5)
    assert path.read_text() == "".join([*first[:3], *second[3:5]])


def test_a_fresh_start_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n')
    JsonlSink(path).close()
    assert path.read_text() == "" and list(iter_jsonl(path)) == []


def test_all_sinks_of_rank_0(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    before = time.time()
    with closing(Sinks(LogConfig(), tmp_path)) as sinks:
        sinks.write({"step": 1, "loss": 0.25})
        sinks.write({"step": 1, "zero_shot/top1": 0.5}, "eval")
    (found,) = lines(tmp_path / "metrics.jsonl")
    assert before - 0.001 <= found.pop("time") <= time.time() + 0.001 and found == {
        "step": 1,
        "loss": 0.25,
    }
    assert lines(tmp_path / "eval.jsonl") == [{"step": 1, "zero_shot/top1": 0.5}]
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.25)]
    assert [e.value for e in events.Scalars("eval/zero_shot/top1")] == [0.5]
    assert "train/time" not in events.Tags()["scalars"]


def write_a_step(run_dir: Path) -> list[str]:
    with closing(Sinks(LogConfig(tensorboard=False), run_dir / str(dist.rank()))) as sinks:
        sinks.write({"step": 1})
    return sorted(path.name for path in run_dir.glob(f"{dist.rank()}/*"))


@pytest.mark.distributed
def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    assert run_ranks(write_a_step, 2, tmp_path) == [
        ["eval.jsonl", "metrics.jsonl"],
        [],
    ]


def test_a_failing_chart_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    calls = []

    def broken(*arguments: object) -> None:
        calls.append(arguments)
        raise RuntimeError("no network")

    monkeypatch.setattr(SummaryWriter, "add_scalar", broken)
    with closing(Sinks(LogConfig(), tmp_path)) as sinks:
        sinks.write({"step": 1, "loss": 0.5})
        sinks.write({"step": 2, "loss": 0.5})
    assert (len(lines(tmp_path / "metrics.jsonl")), len(calls)) == (2, 1)
    assert (
        "tensorboard failed after step 0, and the run continues: RuntimeError: no network"
        in caplog.text
    )


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_says_how_to_get_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    config = LogConfig(**{"tensorboard": False, package: True})
    remedy = (
        f"log.{package} (true): {package} .*; pip install {package}, or set log.{package}=false"
    )
    assert len(config.mistakes_here()) == 1 and re.fullmatch(
        remedy.replace("(", "[(]", 1).replace(")", "[)]", 1), config.mistakes_here()[0]
    )


def test_a_package_of_which_an_import_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wandb.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with closing(Sinks(LogConfig(tensorboard=False, wandb=True), tmp_path)):
        assert "wandb failed after step 0, and the run continues" in caplog.text
        assert "No module named 'no_such_module'" in caplog.text


@pytest.mark.parametrize("setting", ["x_disable_meta", "_disable_meta"])
def test_wandb_goes_on_in_the_same_run(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps no command line; setting: since wandb 0.19, and before."""
    started, logged = [], []

    class Wandb:
        Settings = type("Settings", (), {"__annotations__": {setting: bool}})

        @staticmethod
        def init(**kwargs: object) -> type:
            started.append(kwargs)
            return Wandb

        define_metric = staticmethod(lambda *_, **__: None)
        log = staticmethod(logged.append)
        finish = staticmethod(lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    config = LogConfig(tensorboard=False, wandb=True, wandb_project="p")
    for resume_step in (0, 1):
        with closing(
            Sinks(config, tmp_path / "run", resume_step=resume_step, recipe={"a": 1})
        ) as sinks:
            sinks.write({"step": resume_step + 1, "loss": 1.0})
    assert started[0]["id"] == started[1]["id"]
    assert started[0]["settings"] == {setting: True}
    assert (started[0]["project"], started[0]["config"]) == ("p", {"a": 1})
    assert [record["step"] for record in logged] == [1, 2]
