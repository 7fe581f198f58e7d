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
import glob
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
from typing import Any, Literal

from PIL import Image

from clip_train.data.decode import captions
from clip_train.data.fields import as_json, key_of, scalar
from clip_train.data.formats import (
    UNREAD_EXTENSIONS,
    SkippedFiles,
    extension_for,
    extension_of,
    is_image,
    quiet_pillow,
    walk_files,
)
from clip_train.data.invalid import InvalidSample
from clip_train.data.pixels import decode_image, is_transparent
from clip_train.data.tar import write_shards
from clip_train.errors import UserError
from clip_train.processes import fork_server

IMAGE_KEYS = (
    "filepath", "file_name", "filename", "image_path", "image", "path", "file", "img", "jpg",
    "picture", "photo", "image_name",
)  # fmt: skip
CAPTION_KEYS = ("title", "caption", "captions", "text", "txt", "TEXT", "description", "comment")
DELIMITERS = "\t,;|"  # of a table: the first of these in its head
SIDECARS = (".txt", ".caption")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# In place of .tar: `count`, `successes`, `left_out` (image, reason), `transparent` images, captions of
# `several_lines`, how often each label and template occurs, and `digests`, one of each row's image
# and captions.
STATS_SUFFIX = "_stats.json"
SETTINGS = "shards.json"  # the inputs that the shards of a folder were made from
READABLE = "a .csv, .tsv, .jsonl, .parquet, a pattern such as 'train-*.parquet', or a folder"
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
    skipped: SkippedFiles | None = None,
    out: Path | None = None,
) -> Iterator[Row]:
    """Every row in order. UserError if nothing can be read, or a column is missing.

    label_key: the column of labels. keep: further columns, which become fields of the `.json`.
    skipped: takes the files of a folder that no row has read, outside of `out`.
    """
    skipped = SkippedFiles() if skipped is None else skipped
    tables = tables_of(source)
    if not tables:
        if label_key or keep:
            raise UserError(
                f"--label-key ({label_key}) and --keep-columns ({','.join(keep)}) need a table, "
                f"and SOURCE ({source}) has none: put a metadata.csv with file_name, caption and "
                "these columns into it"
            )
        yield from _folder_rows(source, skipped, out)
        return

    def records() -> Iterator[dict[str, Any] | Row]:
        for table in tables:
            yield from READERS[table.suffix.lower()](table)

    first = next((record for record in records() if isinstance(record, dict)), None)
    if first is None:
        raise UserError(f"SOURCE ({source}) has no rows that can be read")

    column = partial(column_of, first, tables[0])
    image = column([image_key] if image_key else IMAGE_KEYS, "--image-key")
    wanted: list[Sequence[str]] = [[key] for key in caption_keys] or [CAPTION_KEYS]
    caption_columns = [column(names, "--caption-key") for names in wanted]
    kept_columns = {key: column([key], "--keep-columns") for key in keep}
    label_column, named = None, None
    if label_key is not None:
        label_column = column([label_key], "--label-key")
        labels = {_label_of(record, label_column) for record in records()} - {""}
        # pandas writes 3.0 into a table if a cell of its column is empty
        if not all(re.fullmatch(r"\d+(\.0+)?", label) for label in labels):
            named = label_key
    listed: set[str] = set()
    for record in records():
        if isinstance(record, Row):
            yield replace(record, label_key=named)
        else:
            captions = {key: record.get(key) for key in caption_columns}
            kept = {key: record.get(name) for key, name in kept_columns.items()}
            label = _label_of(record, label_column)
            if named is None:
                label = label.partition(".")[0]
            place = record.get(image)
            if isinstance(place, str):
                listed.add(os.path.normpath(source / place))
            yield Row(place, captions, label, named, kept=kept)
    if source.is_dir() and listed:
        _add_unlisted(source, out, listed, skipped)


def column_of(record: Mapping[str, Any], table: Path, names: Sequence[str], option: str) -> str:
    """The first of these columns that a table has, in any case if none is there as it is. UserError
    that names the option."""
    by_lower = {str(name).lower(): name for name in reversed(list(record))}
    for name in [*names, *(by_lower.get(name.lower(), "") for name in names)]:
        if name in record:
            return name
    raise UserError(
        f"SOURCE ({table}) has no column {' or '.join(names)}; its columns are "
        f"{', '.join(map(str, record))}: give {option} NAME"
    )


def tables_of(source: Path) -> list[Path]:
    """The tables that SOURCE names: one, the `.parquet` files of a folder, or those of a pattern.
    []: it is a folder of images. UserError."""
    if source.is_dir():
        for name in METADATA:
            if (source / name).is_file():
                return [source / name]
        paths = list(walk_files(source))
        if any(map(is_image, paths)):
            return []
        tables = [source / path for path in paths if path.endswith(".parquet")]
        # Hugging Face's names: train-00000-of-00002.parquet
        splits = sorted({table.name.split("-")[0] for table in tables if "-of-" in table.name})
        if len(splits) > 1:
            raise UserError(
                f"SOURCE ({source}) has tables of {len(splits)} splits ({', '.join(splits)}): give "
                f"one, such as '{tables[0].parent}/{splits[-1]}-*.parquet'"
            )
        return tables
    tables = [source]
    if not source.exists():
        tables = sorted(map(Path, glob.glob(str(source))))
    if not tables:
        raise UserError(f"SOURCE ({source}): no such file or folder; give {READABLE}")
    if any(table.suffix.lower() not in READERS for table in tables):
        raise UserError(f"SOURCE ({source}) cannot be read as a table: give {READABLE}")
    return tables


def _label_of(record: Mapping[str, Any] | Row, key: str | None) -> str:
    """A number or a name, alone or in a list of one in the table; "" for none."""
    value = record.get(key) if isinstance(record, Mapping) and key is not None else None
    label = scalar(value)
    return "" if label is None else str(label)


def _files_of(folder: Path, out: Path | None) -> Iterator[str]:
    """The files of a folder, without those in the folder that shards are written to."""
    inner = None
    if out is not None and folder.resolve() in out.resolve().parents:
        inner = out.resolve().relative_to(folder.resolve())
    for path in walk_files(folder):
        if inner is None or not Path(path).is_relative_to(inner):
            yield path


def _add_unlisted(folder: Path, out: Path | None, listed: set[str], to: SkippedFiles) -> None:
    """The pictures of a folder that its table does not list."""
    for path in _files_of(folder, out):
        is_picture = is_image(path) or extension_of(path) in UNREAD_EXTENSIONS
        if is_picture and os.path.normpath(folder / path) not in listed:
            to.add(path)


def _folder_rows(folder: Path, skipped: SkippedFiles, out: Path | None) -> Iterator[Row]:
    """In the order of their names, folder by folder."""
    captioned = False
    paths = list(_files_of(folder, out))
    images = [path for path in paths if is_image(path)]
    stems = {os.path.splitext(path)[0] for path in images}
    sidecars: dict[
        str, str
    ] = {}  # by stem and suffix in lower case: cameras and Windows write .TXT
    for path in paths:
        stem, suffix = os.path.splitext(path)
        if suffix.lower() in SIDECARS and stem in stems:
            if (folder / path).is_file():  # not a link to nothing
                sidecars[stem + suffix.lower()] = path
        elif not is_image(path):
            skipped.add(path)
    for path in images:
        stem = os.path.splitext(path)[0]
        beside = [sidecars[stem + suffix] for suffix in SIDECARS if stem + suffix in sidecars]
        text = None
        if beside:
            captioned = True
            text = (folder / beside[0]).read_text("utf-8", "replace")
        yield Row(path, {"txt": text})
    if not captioned:
        others = f"; skipped {skipped}" if skipped.counts else ""
        raise UserError(
            f"SOURCE ({folder}) has no image with a caption: one is x.jpg with x.txt beside it, or "
            f"a row of a metadata.csv in it with the columns file_name and caption{others}"
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
        delimiter = next((each for each in DELIMITERS if each in head), ",")
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
        if delimiter == "|":  # as in Flickr30k's results.csv, whose captions have single quotes (")
            quoting = csv.QUOTE_NONE
        # "filepath, caption": also in the rows, where a quote may follow the blank
        has_blanks = delimiter + " " in head
        file.seek(0)
        table = csv.DictReader(
            file, delimiter=delimiter, strict=True, quoting=quoting, skipinitialspace=has_blanks
        )
        try:
            table.fieldnames = [name.strip() for name in table.fieldnames or ()]
        except csv.Error as e:
            raise UserError(f"SOURCE ({source}), line 1 has {UNREADABLE} ({e})") from e
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
    """An object in each line, or one list of objects."""
    with source.open("rb") as file:
        if file.read(1) == b"[":
            yield from _json_list(source)
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
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


def _json_list(source: Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(source.read_bytes())
    except ValueError as e:
        raise UserError(f"SOURCE ({source}) is not JSON: {e}") from e
    if not all(isinstance(record, dict) for record in records):
        raise UserError(
            f"SOURCE ({source}) is not a list of objects; give one {{...}} for each row"
        )
    return records


def _parquet(source: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as e:
        raise UserError(f"SOURCE ({source}): .parquet needs `pip install pyarrow`") from e
    file = parquet.ParquetFile(source)
    names = class_names(file.schema_arrow.metadata or {})
    for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
        for record in batch.to_pylist():
            for column in names.keys() & record.keys():
                record[column] = _named(record[column], names[column])
            yield record


def class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """The names of the classes in each column of a parquet's schema that Hugging Face's `datasets`
    declares as `ClassLabel`, alone or in a list."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        columns = dict(features)
    except (KeyError, TypeError, ValueError):
        return {}
    names: dict[str, list[str]] = {}
    for column, declared in columns.items():
        feature = declared
        if isinstance(feature, list) and len(feature) == 1:
            feature = feature[0]
        if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
            feature = feature["feature"]
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            names[column] = list(feature.get("names") or [])
    return names


def _named(value: Any, names: Sequence[str]) -> Any:
    """The name of a class by its number; None for -1, which is no class; other values unchanged."""
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    if value == -1:
        return None
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return value


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
    with ProcessPoolExecutor(workers, mp_context=context, initializer=quiet_pillow) as pool:
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
    transparent = several_lines = 0
    for i, row in enumerate(rows, number * per_shard):
        try:
            members = sample_of(row, root)
            samples.append({"__key__": f"{i:09d}", **members})
            labels[row.label] += 1
            templates[template_of(members["txt"], row.label)] += 1
            image = next(iter(members.values()))
            transparent += is_transparent(image)
            several_lines += "\n" in members["txt"]
            compared = image + repr(row.captions).encode()
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
        "transparent": transparent,
        "several_lines": several_lines,
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
        key_of(name): [text.strip() for text in column_texts]
        for name, column_texts in usable.items()
    }
    texts = next(iter(by_column.values()))
    with Image.open(io.BytesIO(data)) as image:
        extension = extension_for(image.format)
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
    return {**members, "json": as_json(fields)} if fields else members


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
