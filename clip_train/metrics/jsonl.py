"""Files of one JSON object per line: `metrics.jsonl`, `eval.jsonl`."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clip_train.errors import ClipTrainError
from clip_train.storage.local import no_wait, open_own


class JsonlSink:
    """Writes one JSON object per line, each line at once.

    Floats keep every digit; NaN and infinities, which JSON does not have, become null.
    """

    def __init__(self, path: Path | str, *, resume_step: int = 0) -> None:
        """resume_step: the step that training continues from. Lines of later steps, which a killed
        run wrote after its last checkpoint, are dropped; 0 starts the file anew. OSError."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        truncate_jsonl(self.path, resume_step)
        self._file = open_own(self.path, "ab")

    def write(self, record: dict[str, Any]) -> None:
        """ClipTrainError if the file was removed or moved: its lines would be lost."""
        try:
            self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise ClipTrainError(
                f"{self.path} was removed or moved under the run, and its numbers would be lost; "
                "put run.dir back, and run the same line again"
            ) from None
        values = {}
        for name, scalar in record.items():
            value = scalar
            if hasattr(scalar, "item"):  # a scalar of numpy or torch
                value = scalar.item()
            is_json = not isinstance(value, float) or math.isfinite(value)
            values[name] = value if is_json else None
        line = json.dumps(values, allow_nan=False, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def truncate_jsonl(path: Path, step: int) -> None:
    """Keep the first line of each step up to `step`; remove later steps, torn lines and repeated
    steps. (If two starts of one run overlap, both write the same steps, with equal numbers.)"""
    if not path.is_file():
        return
    read = 0  # bytes
    written = 0  # bytes that stay
    steps: set[int] = set()
    with path.open("rb") as source, open_own(path, "r+b") as target:
        for line in source:
            read += len(line)
            record = parse_record(line) if line.endswith(b"\n") else None
            if record is None:
                continue
            line_step = record.get("step", 0)
            if line_step > step or line_step in steps:
                continue
            steps.add(line_step)
            if written + len(line) < read:  # a line before this one was removed
                target.seek(written)
                target.write(line)
            written += len(line)
        target.truncate(written)


def iter_jsonl(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records one by one; lines that are not JSON objects are skipped. FileNotFoundError."""
    with open(path, "rb", opener=no_wait) as file:
        for line in file:
            record = parse_record(line)
            if record is not None:
                yield record


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
