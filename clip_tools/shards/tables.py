"""Rows of a table, one by one: .csv, .tsv, .jsonl, .parquet."""

import csv
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from clip_train.data.decode import IMAGE_EXTENSIONS
from clip_train.errors import UserError

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
    """A row with a quote that is not closed takes one line only: the next line is read as a row of
    its own.
    """
    with source.open(newline="", encoding="utf-8-sig") as file:
        first = file.readline()
        delimiter = "\t" if "\t" in first else ","
        header = next(csv.reader([first], delimiter=delimiter), [])
        numbered = enumerate(file, 2)
        lines: deque[tuple[int, str]] = deque()  # read ahead
        while True:
            lines.extend(itertools.islice(numbered, MAX_LINES - len(lines)))
            if not lines:
                return
            place = f"line {lines[0][0]}"
            cells, problem, texts = _first_row([line for _, line in lines], delimiter)
            swallowed = any(_is_row(text, delimiter, len(header)) for text in texts[1:])
            if problem or swallowed:
                texts = texts[:1]
                yield Broken(place, TOO_LONG if "limit" in problem else OPEN_QUOTE)
            elif len(cells) > len(header):
                yield Broken(place, TOO_MANY)
            elif cells:
                yield dict(itertools.zip_longest(header, cells))
            for _ in texts:
                lines.popleft()


def _first_row(lines: list[str], delimiter: str) -> tuple[list[str], str, list[str]]:
    """(its cells, or what is wrong, the lines that it takes)."""
    problem = UNFINISHED
    for count in range(1, len(lines) + 1):
        try:
            cells = next(csv.reader(lines[:count], delimiter=delimiter, strict=True), [])
            return cells, "", lines[:count]
        except csv.Error as e:
            problem = str(e)
        if problem != UNFINISHED:
            break
    return [], problem, lines[:1]


def _is_row(line: str, delimiter: str, columns: int) -> bool:
    """Whether a line within a quoted text is more likely the table's next row: it names an
    image.
    """
    cells = line.strip().split(delimiter)
    extensions = [cell.strip(' "').rpartition(".")[2].lower() for cell in cells]
    return len(cells) >= columns and any(each in IMAGE_EXTENSIONS for each in extensions)


def _json_lines(source: Path) -> Iterator[dict[str, Any]]:
    with source.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line or "null")
            except ValueError as e:
                raise UserError(
                    f"SOURCE ({source}), line {number} is not JSON: {e}; one object in each line"
                ) from e
            if not isinstance(record, dict):
                raise UserError(
                    f"SOURCE ({source}), line {number} is not an object; one {{...}} in each line"
                )
            yield record


def _parquet(source: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as e:
        raise UserError(f"SOURCE ({source}): .parquet needs `pip install pyarrow`") from e
    for batch in parquet.ParquetFile(source).iter_batches(batch_size=ROWS_AT_ONCE):
        yield from batch.to_pylist()


READERS: dict[str, Callable[[Path], Iterator[dict[str, Any] | Broken]]] = {
    ".csv": _csv, ".tsv": _csv, ".txt": _csv, ".jsonl": _json_lines, ".json": _json_lines,
    ".parquet": _parquet,
}  # fmt: skip
