"""Where records go: `metrics.jsonl` and `eval.jsonl` (always), TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import mmap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from clip_train import dist
from clip_train.errors import UserError
from clip_train.metrics.config import LogConfig
from clip_train.storage.local import LocalStorage

logger = logging.getLogger(__name__)

Kind = Literal["train", "eval"]


class JsonlSink:
    """One JSON object per line, handed to the operating system line by line.

    Floats keep every digit; NaN and infinities, which JSON does not have, become null.
    """

    def __init__(self, path: Path | str, *, resume_step: int = 0) -> None:
        """resume_step: the step that training goes on from. Lines of later steps, which a killed run wrote
        after its last checkpoint, are dropped; so 0 starts the file anew. OSError."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        truncate_jsonl(self.path, resume_step)
        self._file = self.path.open("ab", buffering=0)

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        line = json.dumps({key: _jsonable(value) for key, value in record.items()}, allow_nan=False, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def truncate_jsonl(path: Path, step: int) -> None:
    """Cut off, behind the last line of `step` or an earlier one, what follows: later steps, a torn line.

    Steps only grow, so it is read from its end: of a long run's file nothing else comes from the disk.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = len(content)
            while end > 0:
                begin = content.rfind(b"\n", 0, end) + 1
                record = _record(content[begin:end])
                if record is not None and record.get("step", 0) <= step:
                    break
                end = begin - 1
            whole = end + 1 == len(content)
        if not whole:
            file.truncate(max(end, 0))
            if end > 0:  # killed here, the next attempt completes the line
                file.seek(end)
                file.write(b"\n")


def iter_jsonl(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records one by one; lines that are no JSON are left out. FileNotFoundError."""
    with Path(path).open("rb") as file:
        yield from (record for line in file if (record := _record(line)) is not None)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _jsonable(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardSink:
    """TensorBoard's event files in `folder`, tags `train/loss`, `eval/...`."""

    def __init__(self, folder: Path | str, *, resume_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise UserError(
                f"log.tensorboard (true): {e}; pip install tensorboard, or set log.tensorboard=false"
            ) from e
        # TensorBoard hides what an earlier attempt wrote at this step and later
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1, flush_secs=10)

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(f"{kind}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. A resumed run goes on in the same wandb run: its id is kept in the run's folder."""

    def __init__(self, run_dir: Path | str, *, project: str | None, recipe: dict[str, Any] | None) -> None:
        try:
            import wandb
        except ImportError as e:
            raise UserError(
                f"log.wandb (true): wandb cannot be imported ({e}); pip install wandb, or log.wandb=false"
            ) from e
        run_dir = Path(run_dir)
        id_file = run_dir / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:12]
        LocalStorage(run_dir).put_bytes(id_file.name, run_id.encode())
        self._run = wandb.init(
            project=project or "clip-train",
            name=run_dir.name,
            dir=str(run_dir),
            id=run_id,
            resume="allow",
            config=recipe,
        )
        # by our own step: wandb's counter refuses steps that a resumed run does again
        self._run.define_metric("*", step_metric="step")

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        values = {f"{kind}/{name}": value for name, value in record.items() if isinstance(value, (int, float))}
        self._run.log({**values, "step": record["step"]})

    def close(self) -> None:
        self._run.finish()


Chart: TypeAlias = TensorBoardSink | WandbSink


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
            charts.append(WandbSink(run_dir, project=config.wandb_project, recipe=recipe))
        train = JsonlSink(run_dir / "metrics.jsonl", resume_step=resume_step)
        return cls({"train": train, "eval": JsonlSink(run_dir / "eval.jsonl", resume_step=resume_step)}, charts)

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        """`record` to `metrics.jsonl` (train) or `eval.jsonl` (eval), and to the rest."""
        if kind in self._files:
            self._files[kind].write(record)
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
