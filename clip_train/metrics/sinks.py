"""Where records go: `metrics.jsonl` and `eval.jsonl` (always), the report, TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import importlib
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from clip_train import dist
from clip_train.errors import UserError
from clip_train.metrics.config import LogConfig, not_installed
from clip_train.metrics.jsonl import JsonlSink
from clip_train.metrics.report import ReportSink
from clip_train.storage.local import LocalStorage

logger = logging.getLogger(__name__)

Kind = Literal["train", "eval", "invalid"]
"""Of a record: a step, an evaluation, the samples that could not be used so far (`InvalidLog.state`, `pictures`)."""


class TensorBoardSink:
    """TensorBoard's event files in `folder`, tags `train/loss`, `eval/...`."""

    def __init__(self, folder: Path | str, *, resume_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise UserError(not_installed("tensorboard", e)) from e
        # TensorBoard hides what an earlier attempt wrote at this step and later
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1, flush_secs=10)

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(f"{kind}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()


class TrackerSink:
    """Weights & Biases, or Hugging Face's trackio, which takes the same calls and keeps its numbers on this machine.

    A resumed run goes on in the same run there: by its id, which is kept in the run's folder (wandb), or its name.
    """

    def __init__(
        self,
        package: Literal["wandb", "trackio"],
        run_dir: Path | str,
        *,
        project: str | None,
        recipe: Any = None,
    ) -> None:
        """UserError where the package is not installed."""
        try:
            tracker = importlib.import_module(package)
        except ImportError as e:
            raise UserError(not_installed(package, e)) from e
        self._package, run_dir, own = package, Path(run_dir), {}
        if package == "wandb":
            id_file = run_dir / "wandb_id"
            identity = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:12]
            LocalStorage(run_dir).put_bytes(id_file.name, identity.encode())
            own = {"dir": str(run_dir), "id": identity}
        name = run_dir.resolve().name
        self._run = tracker.init(
            project=project or "clip-train", name=name, config=recipe, resume="allow", **own
        )
        if package == "wandb":
            self._run.define_metric("*", step_metric="step")

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        step, numbers = (
            record["step"],
            {k: v for k, v in record.items() if k != "step" and isinstance(v, (int, float))},
        )
        values = {f"{kind}/{name}": value for name, value in numbers.items()}
        if (
            values and self._package == "wandb"
        ):  # by our own step: its counter refuses those that are done again
            self._run.log({**values, "step": step})
        elif values:
            self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


Chart = (
    TensorBoardSink | TrackerSink | ReportSink
)  # it may raise: it is dropped then, and training goes on


class Sinks:
    """All sinks of a run; a no-op on every rank but 0.

    A failing `*.jsonl` raises, since it is part of the result; another sink that fails is dropped with a
    warning, since a chart is no reason to stop a run.
    """

    def __init__(self, files: dict[Kind, JsonlSink], charts: list[Chart]) -> None:
        self._files, self._charts = files, charts

    @classmethod
    def open(
        cls,
        config: LogConfig,
        run_dir: Path | str,
        *,
        resume_step: int = 0,
        recipe: dict[str, Any] | None = None,
    ) -> Sinks:
        """resume_step: the step that training goes on from, 0 for a fresh start. UserError for a sink that is
        not installed; OSError."""
        if not dist.is_main():
            return cls({}, [])
        run_dir = Path(run_dir)
        charts: list[Chart] = []
        if config.tensorboard:
            charts.append(TensorBoardSink(run_dir / "events", resume_step=resume_step))
        if config.wandb:
            charts.append(
                TrackerSink("wandb", run_dir, project=config.wandb_project, recipe=recipe)
            )
        if config.trackio:
            charts.append(
                TrackerSink("trackio", run_dir, project=config.trackio_project, recipe=recipe)
            )
        train = JsonlSink(run_dir / "metrics.jsonl", resume_step=resume_step)
        files: dict[Kind, JsonlSink] = {"train": train}
        files["eval"] = JsonlSink(run_dir / "eval.jsonl", resume_step=resume_step)
        return cls(files, [ReportSink(run_dir), *charts])

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        """`record` to `metrics.jsonl` (train; with the `time`) or `eval.jsonl` (eval), and to the charts."""
        if kind in self._files:
            at = (
                {"time": round(time.time(), 3)} if kind == "train" else {}
            )  # the charts have clocks of their own
            self._files[kind].write({**record, **at})
        self._each_chart(lambda chart: chart.write(record, kind))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._each_chart(lambda chart: chart.close())
        self._charts = []

    def _each_chart(self, call: Callable[[Chart], None]) -> None:
        for chart in list(self._charts):
            try:
                call(chart)
            except Exception as e:
                self._charts.remove(chart)
                logger.warning("%s failed and is off from now on: %s", type(chart).__name__, e)
