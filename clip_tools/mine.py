"""Write the shards of an embedded data set again, with hard negatives in each sample's `.json`
(`clip-train mine`)."""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, track

from clip_train.data.benchmark import benchmark_shards
from clip_train.data.fields import as_json, metadata, without_case
from clip_train.data.invalid import InvalidRecord, InvalidSample
from clip_train.data.reader import read_shard
from clip_train.data.shards import split_name
from clip_train.data.tar import TarSample, write_shards
from clip_train.errors import UserError
from clip_train.mine import HardNegatives, Selection, mine_hard_negatives
from clip_train.storage.base import Storage
from clip_train.storage.redact import WAS_REDACTED
from clip_train.storage.urls import is_remote, local_path, open_storage
from launcher.runtime.log import log, warn

SUMMARY = "mined.json"  # beside the shards: the options that made them, and what was found


def write_mined(features: str, to: str, key: str, selection: Selection, *, quiet: bool) -> str:
    """Mine negatives for the images of `features`, and write each shard that `to` does not have.

    Each shard is written completely or not at all. A sample is left out if it was not embedded or
    has no negative, because `data.negative_texts` cannot use it.

    key: of the `.json`, for the list of negatives. quiet: without progress bars. Returns a summary.

    Raises:
        UserError: the features are incomplete or do not fit the shards, no negative is found, or
            the shards at `to` were made otherwise.
        DataError: a shard cannot be read.
    """
    embedded = Embedded.read(features)
    shard_of = shards_by_name(embedded.shards, features)
    store = open_storage(to)
    made_with = {"features": embedded.digest, "key": key, **dataclasses.asdict(selection)}
    written = {entry.name for entry in store.list()}
    check_made_with(store, to, made_with, written & shard_of.keys())

    mined = mine(embedded, selection, quiet=quiet)
    summary = {
        "made_with": made_with,
        "queries": len(embedded.keys),
        "texts": len({without_case(text) for text in embedded.texts}),
        "queries_by_number_of_negatives": counts_of(mined),
        "dropped_pairs": mined.dropped,
    }
    store.put_bytes(SUMMARY, json.dumps(summary, indent=1).encode())

    rows_of_shard: dict[str, dict[str, int]] = {}
    for row, (shard, sample_key) in enumerate(zip(embedded.shards, embedded.keys, strict=True)):
        rows_of_shard.setdefault(shard, {})[sample_key] = row
    texts = embedded.texts
    missing = [name for name in shard_of if name not in written]
    left_out: Counter[str] = Counter()
    for name in track(missing, "writing", console=Console(stderr=True), disable=quiet):
        shard = shard_of[name]
        texts_of_key = {
            sample_key: [texts[index] for index in mined.indices[row].tolist() if index >= 0]
            for sample_key, row in rows_of_shard[shard].items()
        }
        samples = with_negatives(shard, texts_of_key, key, left_out)
        if not samples:
            warn(f"{shard}: no sample has a negative, so nothing is written")
            continue
        with tempfile.TemporaryDirectory(prefix="clip-train-") as folder:
            write_shards(folder, samples, len(samples), "shard")
            store.put_file(Path(folder, "shard"), name)
        log(f"{name}: {len(samples):,} samples")
    if left_out:
        warn(f"left out of the shards: {dict(left_out)}")
    return described(summary)


def mine(embedded: "Embedded", selection: Selection, *, quiet: bool) -> HardNegatives:
    """The negatives of each image among the texts, on a GPU if there is one."""
    texts = embedded.texts
    first: dict[str, int] = {}
    for row, text in enumerate(texts):
        first.setdefault(without_case(text), row)
    positives = []
    for row, captions in enumerate(embedded.captions):
        others = [first[text] for text in map(without_case, captions[1:]) if text in first]
        positives.append([row, *others])
    with Progress(console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("mining", total=None)
        return mine_hard_negatives(
            embedded.image_features,
            embedded.text_features,
            positives,
            selection,
            texts=texts,
            device="cuda" if torch.cuda.is_available() else "cpu",
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def counts_of(mined: HardNegatives) -> dict[str, int]:
    """The number of queries by their number of negatives, from 0 on."""
    counts = mined.counts.bincount(minlength=mined.indices.shape[1] + 1).tolist()
    return {str(number): count for number, count in enumerate(counts)}


def described(summary: Mapping[str, Any]) -> str:
    """The lines that the command prints."""
    counts = ", ".join(
        f"{count:,} have {number}"
        for number, count in summary["queries_by_number_of_negatives"].items()
    )
    dropped = ", ".join(f"{name} {count:,}" for name, count in summary["dropped_pairs"].items())
    return (
        f"negatives of {summary['queries']:,} images, among {summary['texts']:,} different texts: "
        f"{counts}\npairs of an image and a text that were dropped: {dropped}"
    )


def check_made_with(
    store: Storage, to: str, made_with: Mapping[str, Any], written: set[str]
) -> None:
    """UserError if `to` has shards that were not made by this command with these options.

    written: the names of those of its files that this command would write.
    """
    try:
        before = json.loads(store.read_bytes(SUMMARY))["made_with"]
    except FileNotFoundError:
        if written:
            raise UserError(
                f"--to ({to}) has {min(written)}, which this command did not write; give another "
                "place"
            ) from None
        return
    if before != made_with:
        raise UserError(
            f"--to ({to}) holds shards made with {before}, not with {dict(made_with)}; give another "
            "place"
        )


# -- the folder that `clip-train embed` writes


@dataclass(frozen=True)
class Embedded:
    """The samples that `clip-train embed` wrote, in its order."""

    image_features: "StoredRows"  # float32 [n, D]
    text_features: "StoredRows"  # float32 [n, D], of the first captions
    keys: list[str]
    shards: list[str]  # paths or URLs
    captions: list[list[str]]
    digest: str  # of all files

    @property
    def texts(self) -> list[str]:
        """The first captions, which `text_features` are of."""
        return [captions[0] for captions in self.captions]

    @classmethod
    def read(cls, features: str) -> "Embedded":
        """UserError for a folder without features, or with incomplete ones."""
        if is_remote(features):
            raise UserError(f"FEATURES ({features}) must be a local folder: copy it to a disk")
        folder = local_path(features)
        lists = sorted(folder.glob("samples-*.jsonl"))
        if not lists:
            inside = sorted({file.parent.name for file in folder.glob("*/samples-*.jsonl")})
            hint = f"; give one of its folders {', '.join(inside)}" if inside else ""
            raise UserError(
                f"FEATURES ({features}) has no samples-*.jsonl: give the folder that `clip-train "
                f"embed` wrote{hint}"
            )
        images: list[np.ndarray] = []
        texts: list[np.ndarray] = []
        samples: list[dict[str, Any]] = []
        digest = hashlib.sha256()
        for file in lists:
            lines = file.read_bytes()
            rows = [json.loads(line) for line in lines.splitlines()]
            digest.update(lines)
            for kind, parts in {"image": images, "text": texts}.items():
                path = folder / file.name.replace("samples", kind, 1).replace(".jsonl", ".npy")
                if not path.is_file():
                    raise UserError(
                        f"FEATURES ({features}) has no {path.name}: embed again, without "
                        "--images-only, into an empty folder"
                    )
                part = np.load(path, mmap_mode="r")
                if len(part) != len(rows):
                    raise UserError(
                        f"FEATURES ({features}): {path.name} has {len(part)} rows and {file.name} "
                        f"{len(rows)}: embed again into an empty folder"
                    )
                digest.update(part)
                parts.append(part)
            samples += rows
        seen = Counter((sample["shard"], sample["key"]) for sample in samples)
        (shard, key), count = seen.most_common(1)[0]
        if count > 1:
            raise UserError(
                f"FEATURES ({features}) has the sample {key} of {shard} {count} times: embed again "
                "into an empty folder; if the shard has this key several times, write it again with "
                "different keys"
            )
        return cls(
            StoredRows(images),
            StoredRows(texts),
            [sample["key"] for sample in samples],
            [sample["shard"] for sample in samples],
            [sample["captions"] for sample in samples],
            digest.hexdigest(),
        )


class StoredRows:
    """The rows of several arrays, which may be views of files, as one matrix."""

    def __init__(self, parts: list[np.ndarray]) -> None:
        self.parts = parts
        # the index of each part's first row, and the end
        self.edges = np.cumsum([0, *map(len, parts)])
        widths = {part.shape[1] for part in parts}
        if len(widths) > 1:
            raise UserError(
                f"features have {sorted(widths)} values each: embed again, with one model, into an "
                "empty folder"
            )
        self.shape = (int(self.edges[-1]), widths.pop())

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """The rows of a slice, or of an array of indices."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(self.shape[0]))
        out = np.empty((len(rows), self.shape[1]), self.parts[0].dtype)
        part_of_row = np.searchsorted(self.edges, rows, side="right") - 1
        for number in np.unique(part_of_row):
            own = part_of_row == number
            out[own] = self.parts[number][rows[own] - self.edges[number]]
        return out


# -- shards


def shards_by_name(shards: list[str], features: str) -> dict[str, str]:
    """The embedded shards by their names. UserError if they cannot be written again."""
    shard_of: dict[str, str] = {}
    for shard in dict.fromkeys(shards):
        folder, name = split_name(shard)
        if WAS_REDACTED.search(shard) is not None:
            raise UserError(
                f"FEATURES ({features}): the signature of {shard} was not stored; copy the shards "
                "to a disk, and embed them there"
            )
        if benchmark_shards(folder) is not None:
            raise UserError(
                f"FEATURES ({features}): {shard} belongs to a set of clip_benchmark, where each line "
                "of a .txt is a caption; `clip-train shards` makes shards that can be trained on"
            )
        if not is_remote(shard) and not local_path(shard).is_file():
            raise UserError(
                f"FEATURES ({features}): {shard} is no shard, seen from {os.getcwd()}: run this "
                "command where embed ran; images in folders become shards with `clip-train shards`"
            )
        if name in shard_of:
            raise UserError(
                f"FEATURES ({features}): {shard_of[name]} and {shard} have one name; embed and mine "
                "their folders apart"
            )
        shard_of[name] = shard
    return shard_of


def with_negatives(
    shard: str, texts_of_key: dict[str, list[str]], key: str, left_out: Counter[str]
) -> list[dict[str, Any]]:
    """The samples of a shard that have negatives, with the list in their `.json`.

    texts_of_key: the negatives of each embedded sample. left_out: takes the reasons of the others.
    UserError if the shard does not have all embedded samples.
    """
    samples: list[dict[str, Any]] = []
    unseen = set(texts_of_key)
    for sample in read_shard(shard):
        unseen.discard(sample.key)
        try:
            samples.append(extended(sample, texts_of_key.get(sample.key), key))
        except InvalidSample as e:
            left_out[str(e)] += 1
    if unseen:
        raise UserError(
            f"{shard} does not have the sample {min(unseen)}, which was embedded "
            f"({len(unseen)} such samples): the shard has changed, so embed it again"
        )
    return samples


def extended(
    sample: TarSample | InvalidRecord, texts: list[str] | None, key: str
) -> dict[str, Any]:
    """The sample's members, with its negatives. InvalidSample; UserError if the key is taken."""
    if isinstance(sample, InvalidRecord):
        raise InvalidSample(sample.reason)
    if texts is None:
        raise InvalidSample("not embedded")
    if not texts:
        raise InvalidSample("no negative")
    if None in sample.members.values():
        raise InvalidSample("member is too large")
    fields = metadata(sample.members, strict=True)
    if key in fields:
        raise UserError(
            f"--key ({key}): the .json of {sample.key} has this key already; give another name"
        )
    content = as_json({**fields, key: texts})
    return {**sample.members, "__key__": sample.key, "json": content}
