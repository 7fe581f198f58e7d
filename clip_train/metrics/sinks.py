"""Where records go: `metrics.jsonl` and `eval.jsonl` (always), TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from clip_train import dist
from clip_train.errors import UserError
from clip_train.metrics.config import LogConfig
from clip_train.storage.local import LocalStorage

logger = logging.getLogger(__name__)

Kind = Literal["train", "eval"]
_CHUNK_BYTES = 1 << 16


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
    """Cut off, behind the last line of `step` or an earlier one, what follows: later steps, a torn line.

    Steps only grow, so it is read from its end: a long run's file is not read at all.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole, end = file.seek(0, os.SEEK_END), 0
        for begin, line in _lines_from_the_end(file):
            record = _record(line)
            if record is not None and record.get("step", 0) <= step:
                end = begin + len(line)
                break
        if end and end + 1 == whole:
            return
        file.truncate(end)
        if end:  # killed here, the next attempt completes the line
            file.seek(end)
            file.write(b"\n")


def iter_jsonl(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records one by one; lines that are no JSON are left out. FileNotFoundError."""
    with Path(path).open("rb") as file:
        yield from (record for line in file if (record := _record(line)) is not None)


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """All records at once: of a short file. FileNotFoundError."""
    return list(iter_jsonl(path))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _lines_from_the_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(the byte where it begins, a line without its newline), the last one first; down to byte 0."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start:
        end = start + len(rest)
        start = max(0, start - _CHUNK_BYTES)
        file.seek(start)
        first, *lines = file.read(end - start).split(b"\n")
        for line in reversed(lines):
            yield end - len(line), line
            end -= len(line) + 1
        rest = first
    yield 0, rest


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
