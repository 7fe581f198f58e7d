"""Where records go: `metrics.jsonl` and `eval.jsonl` (always), TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from clip_train import dist
from clip_train.errors import UserError
from clip_train.metrics.config import LogConfig
from clip_train.storage import LocalStorage

logger = logging.getLogger(__name__)

Kind = Literal["train", "eval"]


class Sink(Protocol):
    """Takes records: dicts with "step" and JSON-able values."""

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None: ...

    def close(self) -> None: ...


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
        line = json.dumps(_jsonable(record), allow_nan=False, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def truncate_jsonl(path: Path, step: int) -> None:
    """Drop the lines with a later step than `step` and any that is no JSON (a torn last one), atomically."""
    if not path.exists():
        return
    kept = [line for line, record in _lines(path) if record.get("step", 0) <= step]
    data = b"".join(line + b"\n" for line in kept)
    if data != path.read_bytes():
        LocalStorage(path.parent).put_bytes(path.name, data)


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """All records; lines that are no JSON are left out. FileNotFoundError."""
    return [record for _, record in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield line, record


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if not isinstance(value, (bool, int, float, str, type(None))) and hasattr(value, "item"):
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
            raise UserError("log.wandb (true): wandb is not there; pip install wandb, or log.wandb=false") from e
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


class Sinks:
    """All sinks of a run; a no-op on every rank but 0.

    A failing `*.jsonl` raises, since it is part of the result; another sink that fails is dropped with a
    warning, since a chart is no reason to stop a run.
    """

    def __init__(self, train: JsonlSink | None, evals: JsonlSink | None, others: list[Sink]) -> None:
        self._files: dict[str, JsonlSink | None] = {"train": train, "eval": evals}
        self._others = others

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
            return cls(None, None, [])
        run_dir = Path(run_dir)
        others: list[Sink] = []
        if config.tensorboard:
            others.append(TensorBoardSink(run_dir / "events", resume_step=resume_step))
        if config.wandb:
            others.append(WandbSink(run_dir, project=config.wandb_project, recipe=recipe))
        train = JsonlSink(run_dir / "metrics.jsonl", resume_step=resume_step)
        evals = JsonlSink(run_dir / "eval.jsonl", resume_step=resume_step)
        return cls(train, evals, others)

    def write(self, record: dict[str, Any], kind: Kind = "train") -> None:
        """`record` to `metrics.jsonl` (train) or `eval.jsonl` (eval), and to the rest."""
        file = self._files[kind]
        if file is not None:
            file.write(record)
        for sink in list(self._others):
            try:
                sink.write(record, kind)
            except Exception as e:
                self._others.remove(sink)
                logger.warning("%s failed and is off from now on: %s", type(sink).__name__, e)

    def close(self) -> None:
        for file in self._files.values():
            if file is not None:
                file.close()
        for sink in self._others:
            try:
                sink.close()
            except Exception as e:
                logger.warning("%s could not be closed: %s", type(sink).__name__, e)
        self._others = []

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
