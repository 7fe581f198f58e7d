"""Convert images with captions, from a table or a folder, to WebDataset shards. Every worker
process writes its own shards.

    x.csv, x.tsv, x.jsonl, x.parquet   a row for each sample: the image's path or bytes, its caption
    or captions
    a folder                           images with a `.txt` or `.caption` beside them, or a
    metadata.csv/.jsonl

Shard i holds the rows [i S, (i + 1) S), so it does not depend on the number of processes, and an
existing shard is not written again. Beside each is `NNNNN_stats.json`, as img2dataset has it, with
the rows that were left out.

A label that is a number becomes the sample's `.cls`, as in webdataset. A label that is a name, and
columns to keep, become fields of its `.json`.
"""

import csv
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from PIL import Image

from clip_train.data.decode import IMAGE_EXTENSIONS, captions, decode_image
from clip_train.data.invalid import InvalidSample
from clip_train.data.tar import write_shards
from clip_train.errors import UserError
from clip_train.processes import fork_server

IMAGE_KEYS = (
    "filepath", "file_name", "filename", "image_path", "image", "path", "file", "img", "jpg",
    "picture", "photo",
)  # fmt: skip
CAPTION_KEYS = ("title", "caption", "captions", "text", "txt", "TEXT", "description")
SIDECARS = (".txt", ".caption")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# In place of .tar: `count`, `successes`, `left_out` (image, reason), how often each label and
# template occurs, and `digests`, one of each row's image and captions.
STATS_SUFFIX = "_stats.json"
SETTINGS = "shards.json"  # the inputs that the shards of a folder were made from
READABLE = "a .csv, .tsv, .jsonl, .parquet or a folder"
EXTENSIONS = {"MPO": "jpg", "JPEG": "jpg", "TIFF": "tif"}  # of Pillow's formats
NO_DIGEST = "0" * 16  # of a row that is left out; another's also has 64 bits
ROWS_AT_ONCE = 1000
TEMPLATES = 20  # of a shard's captions, the most frequent
UNREADABLE = 'an unclosed quote ("): close it, or write "" for a quote within a quoted text'
NOT_UTF8 = "a byte that is not UTF-8: save the table as UTF-8"
TOO_MANY = 'more cells than columns: put a text with a comma in it into quotes ("")'


@dataclass(frozen=True)
class Row:
    """One sample before it is checked."""

    image: Any  # a path, or its bytes, or {"bytes": ..., "path": ...} as Hugging Face keeps them
    captions: Mapping[str, Any]  # by column: a text or a list of texts
    label: str = ""  # a number or a name; "": none
    label_key: str | None = None  # the field of the `.json` for a name; None: labels are numbers
    problem: str | None = None  # why it could not be read; `image` is then its place in the table
    kept: Mapping[str, Any] = field(default_factory=dict)  # further fields of the `.json`


def read_rows(
    source: Path,
    image_key: str | None,
    caption_keys: Sequence[str],
    label_key: str | None,
    keep: Sequence[str],
) -> Iterator[Row]:
    """Every row in order. UserError if nothing can be read, or a column is missing. label_key: the
    column of labels. keep: further columns, which become fields of the `.json`.
    """
    table: Path | None = source
    if source.is_dir():
        table = next((source / name for name in METADATA if (source / name).is_file()), None)
    elif not source.exists():
        raise UserError(f"SOURCE ({source}): no such file or folder; give {READABLE}")
    if table is None:
        if label_key or keep:
            raise UserError(
                f"--label-key ({label_key}) and --keep-columns ({','.join(keep)}) need a table, "
                f"and SOURCE ({source}) has none: put a metadata.csv with file_name, caption and "
                "these columns into it"
            )
        yield from _folder_rows(source)
        return
    if table.suffix.lower() not in READERS:
        raise UserError(f"SOURCE ({source}) cannot be read as a table: give {READABLE}")
    reader = READERS[table.suffix.lower()]
    first = next((record for record in reader(table) if isinstance(record, dict)), None)
    if first is None:
        raise UserError(f"SOURCE ({source}) has no rows that can be read")

    def column(names: Sequence[str], option: str) -> str:
        for name in names:
            if name in first:
                return name
        raise UserError(
            f"SOURCE ({table}) has no column {' or '.join(names)}; its columns are "
            f"{', '.join(map(str, first))}: give {option} NAME"
        )

    image = column([image_key] if image_key else IMAGE_KEYS, "--image-key")
    wanted: list[Sequence[str]] = [[key] for key in caption_keys] or [CAPTION_KEYS]
    caption_columns = [column(names, "--caption-key") for names in wanted]
    for key in keep:
        column([key], "--keep-columns")
    named = None
    if label_key is not None:
        column([label_key], "--label-key")
        labels = {_label_of(record, label_key) for record in reader(table)} - {""}
        if not all(label.isdecimal() for label in labels):
            named = label_key
    for record in reader(table):
        if isinstance(record, Row):
            yield replace(record, label_key=named)
        else:
            captions = {key: record.get(key) for key in caption_columns}
            kept = {key: record.get(key) for key in keep}
            label = _label_of(record, label_key)
            yield Row(record.get(image), captions, label, named, kept=kept)


def _label_of(record: Mapping[str, Any] | Row, key: str | None) -> str:
    """A number or a name, alone or in a list of one in the table; "" for none."""
    value = record.get(key) if isinstance(record, Mapping) and key is not None else None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float):  # pandas turns a column of numbers into these if a cell is empty
        return str(int(value)) if value.is_integer() else str(value).replace("nan", "")
    return "" if value is None else str(value).strip()


def _folder_rows(folder: Path) -> Iterator[Row]:
    """In the order of their names, folder by folder."""
    captioned = False
    for root, folders, files in os.walk(folder):
        folders.sort()
        for path in (Path(root, name) for name in sorted(files)):
            if path.suffix.lower().removeprefix(".") in IMAGE_EXTENSIONS:
                sides = [path.with_suffix(suffix) for suffix in SIDECARS]
                texts = [each.read_text("utf-8", "replace") for each in sides if each.is_file()]
                captioned = captioned or bool(texts)
                yield Row(str(path.relative_to(folder)), {"txt": texts[0] if texts else None})
    if not captioned:
        raise UserError(
            f"SOURCE ({folder}) has no image with a caption: one is x.jpg with x.txt beside it, or "
            "a row of a metadata.csv in it with the columns file_name and caption"
        )


# -- tables: their rows one by one


def _csv(source: Path) -> Iterator[dict[str, Any] | Row]:
    """A row that cannot be read becomes a `Row` with a problem, at the line where it ends."""
    with source.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        head = file.readline()
        try:
            head.encode()  # a byte that is not UTF-8 was escaped, and has no code
        except UnicodeEncodeError as e:
            raise UserError(
                f"SOURCE ({source}), line 1 has {NOT_UTF8}, such as with `iconv -f UTF-16 -t UTF-8`"
            ) from e
        delimiter = "\t" if "\t" in head else ","
        file.seek(0)
        table = csv.DictReader(file, delimiter=delimiter, strict=True)
        while True:
            record: dict[Any, Any] | Row
            try:
                record = next(table)
                "".join(map(str, record.values())).encode()
            except StopIteration:
                return
            except UnicodeEncodeError:
                record = Row(f"line {table.reader.line_num}", {}, problem=NOT_UTF8)
            except csv.Error as e:
                record = Row(f"line {table.reader.line_num}", {}, problem=f"{UNREADABLE} ({e})")
            if isinstance(record, dict) and None in record:
                record = Row(f"line {table.reader.line_num}", {}, problem=TOO_MANY)
            yield record


def _json_lines(source: Path) -> Iterator[dict[str, Any]]:
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError as e:
                raise UserError(
                    f"SOURCE ({source}), line {number} is not JSON: {e}; one object in each line, "
                    "in UTF-8"
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


READERS: dict[str, Callable[[Path], Iterator[dict[str, Any] | Row]]] = {
    ".csv": _csv, ".tsv": _csv, ".txt": _csv, ".jsonl": _json_lines, ".json": _json_lines,
    ".parquet": _parquet,
}  # fmt: skip


# -- shards


def make_shards(
    rows: Iterable[Row], folder: Path, root: Path, *, per_shard: int, workers: int
) -> Iterator[Path]:
    """Write every missing shard, and yield all of them in order. OSError.

    root: where relative paths of images begin.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = iter(rows)
    groups = iter(lambda: list(itertools.islice(rows, per_shard)), [])
    write = partial(write_shard, folder, root, per_shard)
    context = fork_server()
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        numbered = enumerate(groups)
        while True:
            some = list(itertools.islice(numbered, 2 * workers))  # the rows in memory
            if not some:
                return
            yield from pool.map(write, *zip(*some, strict=True))


def write_shard(folder: Path, root: Path, per_shard: int, number: int, rows: list[Row]) -> Path:
    """Write one shard with its statistics, completely or not at all. An existing shard is left
    unchanged."""
    path = folder / f"{number:05d}.tar"
    stats = path.with_name(path.stem + STATS_SUFFIX)
    if path.exists() and stats.exists():
        return path
    samples, left_out, digests = [], [], []
    labels: Counter[str] = Counter()
    templates: Counter[str] = Counter()
    for i, row in enumerate(rows, number * per_shard):
        try:
            members = sample_of(row, root)
            samples.append({"__key__": f"{i:09d}", **members})
            labels[row.label] += 1
            templates[template_of(members["txt"], row.label)] += 1
            compared = next(iter(members.values())) + repr(row.captions).encode()
            digests.append(blake2b(compared, digest_size=len(NO_DIGEST) // 2).hexdigest())
        except ValueError as e:
            digests.append(NO_DIGEST)
            left_out.append((row.image if isinstance(row.image, str) else f"row {i}", str(e)))
    part = f"{path.stem}.part"
    if samples:
        write_shards(folder, samples, len(samples), part)
    else:  # a tar without members: the numbers stay those of the rows
        (folder / part).write_bytes(bytes(10240))
    del templates[""]
    content = {
        "count": len(rows),
        "successes": len(samples),
        "left_out": left_out,
        "labels": labels,
        "templates": dict(templates.most_common(TEMPLATES)),
        "digests": "".join(digests),
    }
    stats.write_text(json.dumps(content))
    return (folder / part).replace(path)


def template_of(caption: str, label: str) -> str:
    """The caption with {} in place of its label; "" if it does not name the label once."""
    if not label:
        return ""
    text, count = re.subn(rf"\b{re.escape(label)}\b", "{}", caption, flags=re.IGNORECASE)
    return text if count == 1 and text.count("{}") == 1 else ""


def sample_of(row: Row, root: Path) -> dict[str, Any]:
    """Members of a tar. ValueError, with a reason to count, for a sample that cannot be trained
    on."""
    if row.problem is not None:
        raise ValueError(row.problem)
    data = row.image
    if isinstance(data, dict):
        data = data.get("bytes") or data.get("path")
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
        names = {f"json.{column}": 1.0 for column in row.captions}
        usable = captions({"json": dict(row.captions)}, names)
        decode_image(data)
    except InvalidSample as e:
        raise ValueError(str(e)) from e
    by_column = {
        name.removeprefix("json."): [text.strip() for text in column_texts]
        for name, column_texts in usable.items()
    }
    texts = next(iter(by_column.values()))
    with Image.open(io.BytesIO(data)) as image:
        extension = EXTENSIONS.get(str(image.format), str(image.format).lower())
    members: dict[str, Any] = {extension: data, "txt": texts[0]}
    fields = dict(row.kept)
    if len(texts) > 1:
        fields["captions"] = texts
    if len(row.captions) > 1:
        fields |= by_column
    if row.label and row.label_key is not None:
        fields[row.label_key] = row.label
    elif row.label:
        members["cls"] = int(row.label)
    return {**members, "json": json.dumps(fields, default=str).encode()} if fields else members


def same_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Record the inputs of the shards. UserError if existing shards were made from other inputs."""
    file = folder / SETTINGS
    before = json.loads(file.read_text()) if file.exists() else {}
    if any(folder.glob("*.tar")) and before != dict(settings):
        changed = [
            f"{k}: {before[k]}, now {v}" for k, v in settings.items() if before.get(k, v) != v
        ]
        others = "; ".join(changed) or "they were not written by clip-train"
        raise UserError(
            f"OUT ({folder}) holds other shards ({others}): remove them, or give another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dict(settings), indent=1))
