"""Where records go: `metrics.jsonl`, `eval.jsonl` and `invalid.json`, TensorBoard, W&B."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from clip_train import dist
from clip_train.callbacks import Callback
from clip_train.metrics.config import LogConfig
from clip_train.metrics.jsonl import JsonlSink
from clip_train.metrics.skipped import Skipped
from clip_train.storage.local import LocalStorage

Kind = Literal["train", "eval", "invalid"]
"""The kind of a record: a step, an evaluation, the samples that could not be used so far
(`InvalidLog`)."""
OFF = "it is off until the run starts again; metrics.jsonl and eval.jsonl have all numbers"


def numbers_of(record: dict[str, Any], kind: Kind) -> dict[str, float]:
    """The numbers of a record by their names in charts: `train/loss`, `eval/...`."""
    return {
        f"{kind}/{name}": value
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float))
    }


class TensorBoardSink:
    """TensorBoard's event files in `folder`, tags `train/loss`, `eval/...`."""

    def __init__(self, folder: Path | str, *, resume_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides events of an earlier attempt from this step on
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1, flush_secs=10)

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        for name, value in numbers_of(record, kind).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. A resumed run continues there: its id is kept in the run's folder."""

    def __init__(self, run_dir: Path, project: str | None, recipe: Any = None) -> None:
        import wandb  # type: ignore[import-not-found]

        id_file = run_dir / "wandb_id"
        identity = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:12]
        LocalStorage(run_dir).put_bytes(id_file.name, identity.encode())
        # no metadata: it would contain the command line, with its secrets
        disable_meta = "_disable_meta"
        if "x_disable_meta" in wandb.Settings.__annotations__:  # from wandb 0.19 on
            disable_meta = "x_disable_meta"
        self._run = wandb.init(
            project=project or "clip-train",
            name=run_dir.resolve().name,
            id=identity,
            dir=str(run_dir),
            config=recipe,
            resume="allow",
            settings={disable_meta: True},
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        numbers = numbers_of(record, kind)
        if numbers:  # `step` is a metric of ours: wandb's own counter refuses repeated steps
            self._run.log({**numbers, "step": record["step"]})

    def close(self) -> None:
        self._run.finish()


Chart = TensorBoardSink | WandbSink


class Sinks(Callback):
    """All sinks of a run; a no-op except on rank 0.

    A failing `*.jsonl` raises, because it is part of the result. Any other sink that fails, even
    while it opens, is dropped with a warning (`Skipped`).
    """

    def __init__(
        self,
        config: LogConfig,
        run_dir: Path | str,
        *,
        resume_step: int = 0,
        recipe: dict[str, Any] | None = None,
        skipped: Skipped | None = None,
    ) -> None:
        """resume_step: the step that training continues from, 0 for a fresh start. skipped: takes
        the sinks that fail. OSError for the files."""
        self._skipped = skipped or Skipped()
        self._files: dict[Kind, JsonlSink] = {}
        self._charts: dict[str, Chart] = {}  # by name, as in warnings
        if not dist.is_main():
            return
        run_dir = Path(run_dir)
        self._folder = LocalStorage(run_dir)
        makers: dict[str, Callable[[], Chart]] = {}
        if config.wandb:
            makers["wandb"] = partial(WandbSink, run_dir, config.wandb_project, recipe)
        if config.tensorboard:
            events = run_dir / "events"
            makers["tensorboard"] = partial(TensorBoardSink, events, resume_step=resume_step)
        for name, make in makers.items():
            chart = self._skipped.attempt(name, make, remedy=OFF)
            if chart is not None:
                self._charts[name] = chart
        self._files = {
            "train": JsonlSink(run_dir / "metrics.jsonl", resume_step=resume_step),
            "eval": JsonlSink(run_dir / "eval.jsonl", resume_step=resume_step),
        }

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        """Write a record to `metrics.jsonl` (train; with the `time`), `eval.jsonl` (eval) or
        `invalid.json` (invalid), and to the charts."""
        if kind == "invalid" and self._files:
            put = partial(self._folder.put_bytes, "invalid.json", json.dumps(record).encode())
            self._skipped.attempt("invalid.json", put, remedy="report.html lacks their number")
        if kind in self._files:
            line = dict(record)
            if kind == "train":  # charts record the time themselves
                line["time"] = round(time.time(), 3)
            self._files[kind].write(line)
        for name, chart in list(self._charts.items()):
            self._try(name, partial(chart.write, record, kind))

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        self.write(record)

    def after_evaluate(self, record: dict[str, Any]) -> None:
        self.write(record, "eval")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        for name, chart in list(self._charts.items()):
            self._try(name, chart.close)
        self._charts = {}

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as e:
            self._skipped.note(name, e, OFF)
            del self._charts[name]
