"""Images with captions, as a table or a folder, -> WebDataset shards; every worker process writes shards of its own.

    x.csv, x.tsv, x.jsonl, x.parquet   a row for each sample: the image's path or bytes, its caption or captions
    a folder                           images with a `.txt` or `.caption` beside them, or a metadata.csv/.jsonl
    x.arrow, or a folder of them       a Hugging Face dataset, as `save_to_disk` leaves it

Shard i holds the rows [i S, (i + 1) S), so it is the same however many processes there are, and one that is there need
not be written again. Beside each lies `NNNNN_stats.json`, as img2dataset has it, with the rows that were left out.

A label that is a number becomes the sample's `.cls`, as in webdataset. A label that is a name, and columns to keep,
become fields of its `.json`.
"""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clip_tools.shards.tables import ARROW, READERS, Broken
from clip_train.data.index import STATS_SUFFIX
from clip_train.errors import UserError

IMAGE_KEYS = ("filepath", "file_name", "image_path", "image", "path", "file", "img", "jpg")
CAPTION_KEYS = ("title", "caption", "captions", "text", "txt", "TEXT", "description")
SIDECARS = (".txt", ".caption")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
SETTINGS = "shards.json"  # what the shards of a folder were made of
SPLITS = "dataset_dict.json"  # of Hugging Face's DatasetDict, a folder of datasets
READABLE = "a .csv, .tsv, .jsonl, .parquet, .arrow or a folder"


@dataclass(frozen=True)
class Row:
    """One sample before it is looked at."""

    image: Any  # a path, or its bytes, or {"bytes": ..., "path": ...} as Hugging Face keeps them
    captions: Mapping[str, Any]  # by column: a text or a list of texts
    label: str = ""  # a number or a name; "": none
    label_key: str | None = (
        None  # the field of the `.json` for a name; None: labels are numbers, for the `.cls`
    )
    kept: Mapping[str, Any] = field(default_factory=dict)  # further fields of the `.json`
    problem: str | None = (
        None  # why the row could not be read; `image` is then its place in the table
    )


@dataclass(frozen=True)
class Written:
    """What became of one shard's rows."""

    path: Path
    samples: int
    left_out: list[tuple[str, str]]  # image, reason
    labels: Mapping[str, int] = field(default_factory=dict)  # label -> samples; "": without one


def read_rows(
    source: Path,
    image_key: str | None = None,
    caption_keys: Sequence[str] = (),
    label_key: str | None = None,
    keep: Sequence[str] = (),
) -> Iterator[Row]:
    """Every row in order. UserError if nothing can be read, or a column is missing.

    Args:
        label_key: the column of labels.
        keep: further columns, which become fields of the `.json`.
    """
    table = _table_of(source)
    if table is None:
        if label_key or keep:
            raise UserError(
                f"--label-key ({label_key}) and --keep-columns ({','.join(keep)}) are columns of a table, and SOURCE "
                f"({source}) has none: put a metadata.csv with file_name, caption and these columns into it"
            )
        yield from _folder_rows(source)
        return
    reader = ARROW if table.is_dir() else READERS[table.suffix.lower()]
    first = next((record for record in reader(table) if isinstance(record, dict)), None)
    if first is None:
        raise UserError(f"SOURCE ({source}) has no rows that can be read")
    image = _column(table, first, [image_key] if image_key else IMAGE_KEYS, "--image-key")
    wanted = [_column(table, first, [key], "--caption-key") for key in caption_keys]
    wanted = wanted or [_column(table, first, CAPTION_KEYS, "--caption-key")]
    for key in [label_key] if label_key else []:
        _column(table, first, [key], "--label-key")
    for key in keep:
        _column(table, first, [key], "--keep-columns")
    named = label_key
    if label_key is not None and _are_numbers(reader(table), label_key):
        named = None
    for record in reader(table):
        if isinstance(record, Broken):
            yield Row(record.place, {}, label_key=named, problem=record.reason)
            continue
        captions = {key: record.get(key) for key in wanted}
        kept = {key: record.get(key) for key in keep}
        yield Row(record.get(image), captions, _label_of(record, label_key), named, kept)


def _table_of(source: Path) -> Path | None:
    """The table in a folder, or `source` itself; None for a folder of images. UserError."""
    if (source / SPLITS).is_file():
        names = " or ".join(str(each) for each in sorted(source.iterdir()) if each.is_dir())
        raise UserError(f"SOURCE ({source}) holds several splits: give one, {names}")
    if source.is_dir() and not any(source.glob("*.arrow")):
        return next((source / name for name in METADATA if (source / name).is_file()), None)
    if not source.exists():
        raise UserError(f"SOURCE ({source}): no such file or folder; give {READABLE}")
    if not source.is_dir() and source.suffix.lower() not in READERS:
        raise UserError(f"SOURCE ({source}) is no table that can be read: give {READABLE}")
    return source


def _are_numbers(records: Iterable[dict[str, Any] | Broken], key: str) -> bool:
    """Whether all labels are numbers. A number that is not a text, as in Parquet, decides for all of them."""
    texts = False
    for record in records:
        label = _label_of(record, key)
        if label and isinstance(record, dict) and not isinstance(record[key], str):
            return label.isdecimal()
        if label and not label.isdecimal():
            return False
        texts = texts or label != ""
    return texts


def _label_of(record: Mapping[str, Any] | Broken, key: str | None) -> str:
    """A number or a name, alone or in a list of one in the table; "" for none."""
    value = record.get(key) if isinstance(record, Mapping) and key is not None else None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float):  # pandas turns a column of numbers into these if a cell is empty
        return str(int(value)) if value.is_integer() else str(value).replace("nan", "")
    return "" if value is None else str(value).strip()


def _column(source: Path, record: Mapping[str, Any], names: Sequence[str], option: str) -> str:
    """The first of `names` that the table has. UserError with the remedy."""
    found = next((name for name in names if name in record), None)
    if found is None:
        columns = ", ".join(map(str, record))
        raise UserError(
            f"SOURCE ({source}) has no column {' or '.join(names)}; its columns are {columns}: say {option} NAME"
        )
    return found


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
        left = [tuple(each) for each in found["left_out"]]
        return Written(path, found["successes"], left, found.get("labels", {}))
    samples, left_out = [], []
    labels: Counter[str] = Counter()
    for i, row in enumerate(rows):
        try:
            samples.append({"__key__": f"{number * per_shard + i:09d}", **sample_of(row, root)})
            labels[row.label] += 1
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
    found = {"count": len(rows), "successes": len(samples), "left_out": left_out, "labels": labels}
    stats.write_text(json.dumps(found))
    (folder / part).replace(path)
    return Written(path, len(samples), left_out, labels)


def sample_of(row: Row, root: Path) -> dict[str, Any]:
    """Members of a tar. ValueError, in words to count, for what cannot be trained on."""
    from clip_train.data.decode import captions, decode_image
    from clip_train.data.invalid import InvalidSample

    if row.problem is not None:
        raise ValueError(row.problem)
    names = {f"json.{column}": 1.0 for column in row.captions}
    try:
        usable = captions({"json": dict(row.captions)}, names)
    except InvalidSample as e:
        raise ValueError(e.reason) from e
    by_column = {
        name.removeprefix("json."): [text.strip() for text in texts]
        for name, texts in usable.items()
    }
    data = content_of(row.image)
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
    fields = dict(row.kept)
    if row.label and row.label_key is not None:
        fields[row.label_key] = row.label
    elif row.label and not row.label.isdecimal():
        raise ValueError("label is not a whole number from 0 on, as the others are")
    elif row.label:
        members["cls"] = int(row.label)
    fields |= {"captions": texts} if len(texts) > 1 else {}
    fields |= by_column if len(row.captions) > 1 else {}
    return {**members, "json": json.dumps(fields, default=str).encode()} if fields else members


def content_of(image: Any) -> Any:
    """Bytes or a path. Hugging Face keeps an image as {"bytes": ..., "path": ...}."""
    return image.get("bytes") or image.get("path") if isinstance(image, dict) else image


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
