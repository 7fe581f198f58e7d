"""Rows of a table, one by one: .csv, .tsv, .jsonl, .parquet and Arrow's files."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from clip_train.errors import UserError

ARROW_FILE = b"ARROW1"  # what a file begins with, and a stream does not
ROWS_AT_ONCE = 1000
MAX_LINES = 100  # of one row of a CSV, whose texts may hold line breaks
UNFINISHED = "unexpected end of data"  # Python's csv, within a quoted text
OPEN_QUOTE = 'a quote (") is not closed: close it, or write "" for a quote within a quoted text'
TOO_LONG = "a text of more than 131,072 characters"
TOO_MANY = 'more cells than columns: put a text with a comma in it into quotes ("")'


class Broken(NamedTuple):
    """A row that cannot be read."""

    place: str  # where it begins
    reason: str


def _csv(source: Path) -> Iterator[dict[str, Any] | Broken]:
    """A row with a quote that is not closed takes one line only: the next line is read as a row of its own."""
    with source.open(newline="", encoding="utf-8-sig") as file:
        first = file.readline()
        delimiter = "	" if "	" in first else ","
        header = next(csv.reader([first], delimiter=delimiter), [])
        numbered = enumerate(file, 2)
        waiting: deque[tuple[int, str]] = deque()  # lines that a broken row had taken

        def take() -> list[tuple[int, str]]:
            return [waiting.popleft()] if waiting else list(itertools.islice(numbered, 1))

        taken = take()
        while taken:
            lines = [line for _, line in taken]
            cells: list[str] = []
            problem = ""
            try:
                cells = next(csv.reader(lines, delimiter=delimiter, strict=True), [])
            except csv.Error as e:
                problem = str(e)
            more = take() if problem == UNFINISHED and len(taken) < MAX_LINES else []
            if more:
                taken = taken + more
                continue
            swallowed = any(_is_row(line, delimiter, len(header)) for line in lines[1:])
            if problem or swallowed:
                yield Broken(f"line {taken[0][0]}", TOO_LONG if "limit" in problem else OPEN_QUOTE)
                waiting.extendleft(reversed(taken[1:]))
            elif len(cells) > len(header):
                yield Broken(f"line {taken[0][0]}", TOO_MANY)
            elif cells:
                yield dict(itertools.zip_longest(header, cells))
            taken = take()


def _is_row(line: str, delimiter: str, columns: int) -> bool:
    """Whether a line within a quoted text is more likely the table's next row: it names an image."""
    from clip_train.data.decode import IMAGE_EXTENSIONS

    cells = line.strip().split(delimiter)
    extensions = [cell.strip(' "').rpartition(".")[2].lower() for cell in cells]
    return len(cells) >= columns and any(each in IMAGE_EXTENSIONS for each in extensions)


def _json_lines(source: Path) -> Iterator[dict[str, Any]]:
    with source.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line) if line.strip() else None
            except ValueError as e:
                raise UserError(
                    f"SOURCE ({source}), line {number} is not JSON: {e}; one object in each line"
                ) from e
            if isinstance(record, dict):
                yield record
            elif record is not None:
                raise UserError(
                    f"SOURCE ({source}), line {number} is no object; one {{...}} in each line"
                )


def _parquet(source: Path) -> Iterator[dict[str, Any]]:
    for batch in (
        _pyarrow(source, "parquet").ParquetFile(source).iter_batches(batch_size=ROWS_AT_ONCE)
    ):
        yield from batch.to_pylist()


def read_arrow(source: Path) -> Iterator[dict[str, Any]]:
    """Arrow's streams, or files, one after another."""
    ipc = _pyarrow(source, "ipc")
    for file in sorted(source.glob("*.arrow")) if source.is_dir() else [source]:
        with file.open("rb") as opened:
            is_file = opened.read(len(ARROW_FILE)) == ARROW_FILE
            opened.seek(0)
            reader = ipc.open_file(opened) if is_file else ipc.open_stream(opened)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for start in range(0, len(batch), ROWS_AT_ONCE):
                    yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()


def _pyarrow(source: Path, module: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError as e:
        raise UserError(
            f"SOURCE ({source}): {source.suffix or '.arrow'} needs `pip install pyarrow`"
        ) from e


READERS: dict[str, Callable[[Path], Iterator[dict[str, Any] | Broken]]] = {
    ".csv": _csv, ".tsv": _csv, ".txt": _csv, ".jsonl": _json_lines, ".json": _json_lines, ".parquet": _parquet,
    ".arrow": read_arrow,
}  # fmt: skip


ARROW = read_arrow
