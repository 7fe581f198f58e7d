"""Images with captions, as a table or a folder, -> WebDataset shards; every worker process writes shards of its own.

    x.csv, x.tsv, x.jsonl, x.parquet   a row for each sample: the image's path or bytes, its caption or captions
    a folder                           images with a `.txt` or `.caption` beside them, or a metadata.csv/.jsonl
    x.arrow, or a folder of them       a Hugging Face dataset, as `save_to_disk` leaves it

Shard i holds the rows [i S, (i + 1) S), so it is the same however many processes there are, and one that is there need
not be written again. Beside each lies `NNNNN_stats.json`, as img2dataset has it, with the rows that were left out.
"""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clip_train.data.index import STATS_SUFFIX
from clip_train.errors import UserError

IMAGE_KEYS = ("filepath", "file_name", "image_path", "image", "path", "file", "img", "jpg")
CAPTION_KEYS = ("title", "caption", "captions", "text", "txt", "TEXT", "description")
SIDECARS = (".txt", ".caption")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
SETTINGS = "shards.json"  # what the shards of a folder were made of
SPLITS = "dataset_dict.json"  # of Hugging Face's DatasetDict, a folder of datasets
ARROW_FILE = b"ARROW1"  # what a file begins with, and a stream does not
ROWS_AT_ONCE = 1000
READABLE = "a .csv, .tsv, .jsonl, .parquet, .arrow or a folder"


@dataclass(frozen=True)
class Row:
    """One sample before it is looked at."""

    image: Any  # a path, or its bytes, or {"bytes": ..., "path": ...} as Hugging Face keeps them
    captions: Mapping[str, Any]  # by column: a text or a list of texts


@dataclass(frozen=True)
class Written:
    """What became of one shard's rows."""

    path: Path
    samples: int
    left_out: list[tuple[str, str]]  # image, reason


def read_rows(
    source: Path, image_key: str | None = None, caption_keys: Sequence[str] = ()
) -> Iterator[Row]:
    """Every row in order. UserError where nothing can be read, or the columns are not known."""
    if source.is_dir() and (source / SPLITS).is_file():
        names = " or ".join(str(each) for each in sorted(source.iterdir()) if each.is_dir())
        raise UserError(f"SOURCE ({source}) holds several splits: give one, {names}")
    if source.is_dir() and not any(source.glob("*.arrow")):
        table = next((source / name for name in METADATA if (source / name).is_file()), None)
        if table is None:
            yield from _folder_rows(source)
            return
        source = table
    if not source.exists():
        raise UserError(f"SOURCE ({source}): no such file or folder; give {READABLE}")
    reader = _arrow if source.is_dir() else READERS.get(source.suffix.lower())
    if reader is None:
        raise UserError(f"SOURCE ({source}) is no table that can be read: give {READABLE}")
    records = reader(source)
    first = next(records, None)
    if first is None:
        raise UserError(f"SOURCE ({source}) has no rows")
    image = _column(source, first, [image_key] if image_key else IMAGE_KEYS, "image")
    wanted = [_column(source, first, [key], "caption") for key in caption_keys]
    wanted = wanted or [_column(source, first, CAPTION_KEYS, "caption")]
    for record in itertools.chain([first], records):
        yield Row(record.get(image), {key: record.get(key) for key in wanted})


def _column(source: Path, record: Mapping[str, Any], names: Sequence[str], what: str) -> str:
    """The first of `names` that the table has. UserError with the remedy."""
    found = next((name for name in names if name in record), None)
    if found is None:
        columns = ", ".join(map(str, record))
        raise UserError(
            f"SOURCE ({source}) has no column {' or '.join(names)} for the {what}; its columns are {columns}: "
            f"say --{what}-key NAME"
        )
    return found


def _csv(source: Path) -> Iterator[dict[str, Any]]:
    with source.open(newline="", encoding="utf-8-sig") as file:
        header = file.readline()
        file.seek(0)
        yield from csv.DictReader(file, delimiter="\t" if "\t" in header else ",")


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


def _arrow(source: Path) -> Iterator[dict[str, Any]]:
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


READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".csv": _csv, ".tsv": _csv, ".txt": _csv, ".jsonl": _json_lines, ".json": _json_lines, ".parquet": _parquet,
    ".arrow": _arrow,
}  # fmt: skip


def _folder_rows(folder: Path) -> Iterator[Row]:
    if not any(_beside(path) for path in _images(folder)):
        raise UserError(
            f"SOURCE ({folder}) has no image with a caption: one is x.jpg with x.txt beside it, or a row of a "
            "metadata.csv in it with the columns file_name and caption"
        )
    for path in _images(folder):
        beside = _beside(path)
        text = beside and beside.read_text(encoding="utf-8", errors="replace")
        yield Row(str(path.relative_to(folder)), {"txt": text})


def _images(folder: Path) -> Iterator[Path]:
    """In the order of their names, folder by folder."""
    from clip_train.data.decode import IMAGE_EXTENSIONS

    for root, folders, files in os.walk(folder):
        folders.sort()
        paths = (Path(root, name) for name in sorted(files))
        yield from (
            path for path in paths if path.suffix.lower().removeprefix(".") in IMAGE_EXTENSIONS
        )


def _beside(image: Path) -> Path | None:
    """Its caption's file."""
    return next(
        (side for suffix in SIDECARS if (side := image.with_suffix(suffix)).is_file()), None
    )


def make_shards(
    rows: Iterable[Row], folder: Path, root: Path, *, per_shard: int, workers: int
) -> Iterator[Written]:
    """Write every shard that is not there yet. root: where relative paths of images begin. OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = iter(partial(lambda rows: list(itertools.islice(rows, per_shard)), iter(rows)), [])
    write = partial(write_shard, folder, root, per_shard)
    context = multiprocessing.get_context("forkserver")  # file systems do not survive a fork
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        numbered = enumerate(groups)
        while some := list(
            itertools.islice(numbered, 2 * workers)
        ):  # no more rows in memory than these
            yield from pool.map(write, *zip(*some, strict=True))


def write_shard(folder: Path, root: Path, per_shard: int, number: int, rows: list[Row]) -> Written:
    """One shard, whole or not at all; as it is where it is there already."""
    from clip_train.data.tar import write_shards

    path = folder / f"{number:05d}.tar"
    stats = path.with_name(path.stem + STATS_SUFFIX)
    if path.exists() and stats.exists():
        found = json.loads(stats.read_text())
        return Written(path, found["successes"], [tuple(each) for each in found["left_out"]])
    samples, left_out = [], []
    for i, row in enumerate(rows):
        try:
            samples.append({"__key__": f"{number * per_shard + i:09d}", **sample_of(row, root)})
        except ValueError as e:
            left_out.append(
                (
                    row.image if isinstance(row.image, str) else f"row {number * per_shard + i}",
                    str(e),
                )
            )
    part = f"{path.stem}.part"
    if samples:
        write_shards(folder, samples, len(samples), part)
    else:
        (folder / part).write_bytes(
            bytes(10240)
        )  # a tar without members: the numbers stay those of the rows
    stats.write_text(
        json.dumps({"count": len(rows), "successes": len(samples), "left_out": left_out})
    )
    (folder / part).replace(path)
    return Written(path, len(samples), left_out)


def sample_of(row: Row, root: Path) -> dict[str, Any]:
    """Members of a tar. ValueError, in words to count, for what cannot be trained on."""
    from clip_train.data.decode import decode_image
    from clip_train.data.invalid import InvalidSample

    by_column = {
        column: texts for column, value in row.captions.items() if (texts := _texts(value))
    }
    if not by_column:
        raise ValueError("no caption")
    data = (
        row.image.get("bytes") or row.image.get("path")
        if isinstance(row.image, dict)
        else row.image
    )
    if isinstance(data, str):
        if data.startswith(("http://", "https://", "s3://")):
            raise ValueError("image is a URL: fetch it with img2dataset --output_format webdataset")
        try:
            data = (root / data).read_bytes()
        except OSError as e:
            raise ValueError(f"image cannot be read: {e.strerror}") from e
    if not isinstance(data, bytes) or not data:
        raise ValueError("no image")
    try:
        decode_image(data)
    except InvalidSample as e:
        raise ValueError(e.reason) from e
    texts = next(iter(by_column.values()))
    members: dict[str, Any] = {_extension(data): data, "txt": texts[0]}
    several = {"captions": texts} if len(texts) > 1 else {}
    several |= by_column if len(row.captions) > 1 else {}
    return {**members, "json": several} if several else members


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _extension(data: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif"}.get(
            str(image.format), str(image.format).lower()
        )


def same_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note what the shards are made of; UserError where those that are there were made of something else."""
    file = folder / SETTINGS
    before = json.loads(file.read_text()) if file.exists() else {}
    if any(folder.glob("*.tar")) and before != dict(settings):
        changed = [
            f"{k}: {before[k]}, now {v}"
            for k, v in settings.items()
            if k in before and before[k] != v
        ]
        others = "; ".join(changed) or "they are not from here"
        raise UserError(
            f"OUT ({folder}) holds other shards ({others}): remove them, or give another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dict(settings), indent=1))
