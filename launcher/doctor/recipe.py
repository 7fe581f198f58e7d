"""What `clip-train doctor RECIPE` looks at besides: the recipe, its shards and captions, its stores, its disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from clip_train.checkpoint.config import try_all
from clip_train.data.config import DataConfig, SourceSummary, check_source
from clip_train.data.decode import caption
from clip_train.data.invalid import InvalidSample
from clip_train.data.shards import Reading, open_shard, split_sources
from clip_train.data.tar import iter_samples
from clip_train.errors import UserError
from clip_train.models.clip import count_parameters
from clip_train.storage.config import StorageConfig
from clip_train.storage.urls import is_remote, open_storage
from launcher.config.recipe import RunConfig
from launcher.doctor.findings import Finding, error, ok, warning
from launcher.engines import package
from launcher.runtime.environment import detect
from launcher.runtime.verdict import STOP_FILE
from launcher.slurm.profile import load_site

LOOK_AT = 200  # samples of a source's first shard
LOOK_SECONDS = 3.0  # at all sources together
PATIENCE_SECONDS = 5.0  # of the store, less than a run has


@dataclass(frozen=True)
class Source:
    """One of the parts that `::` joins."""

    key: str  # data.train or data.val
    spec: str
    which: str  # of several, else ""
    data: DataConfig  # of it alone

    @property
    def name(self) -> str:
        return f"{self.key} ({self.spec}){self.which and f', {self.which}'}"


def sources(data: DataConfig) -> list[Source]:
    """Of data.train and data.val."""
    found: list[Source] = []
    for key, spec in (("data.train", data.train), ("data.val", data.val)):
        parts = split_sources(spec) if spec is not None else []
        for number, part in enumerate(parts):
            weight = data.train_weights[number] if key == "data.train" and data.train_weights else None
            which = f"source {number + 1} of {len(parts)}" if len(parts) > 1 else ""
            which += "" if weight is None or not which else f", weight {weight:g}"
            alone = {"train": part, "val": None, "train_weights": None, "resampled": False}
            found.append(Source(key, part, which, data.model_copy(update=alone)))
    return found


def check_shards(config: RunConfig) -> Iterator[Finding]:
    """Of every source its shards, its index and its captions; a mistake in one does not hide the others."""
    storage = config.storage.model_copy(update={"attempts": min(3, config.storage.attempts)})
    each = sources(config.data)
    for source in each:
        try:
            found = check_source(source.data, storage)
            yield from check_ends(source, found, storage)
        except UserError as e:
            which = f"{source.which}: " if source.which else ""
            message = which + str(e).replace("data.train", source.key, 1)
            yield error("shards", message, "see the message; `clip-train index --check` reads all of them")
            continue
        if source.key == "data.train":
            yield from check_index(source, found)
        yield from check_captions(source, found, storage, LOOK_SECONDS / len(each))


def check_ends(source: Source, found: SourceSummary, storage: StorageConfig) -> Iterator[Finding]:
    """The last shard too: a range of braces that is too long shows there, since remote ones are not listed."""
    last = found.index.shards[-1]
    if is_remote(last):
        try:
            with open_shard(last, Reading(storage)) as file:
                file.read(512)
        except OSError as e:
            message = f"{source.name}: the last shard, {last}, cannot be read ({type(e).__name__}: {e})"
            yield error("shards", message, "correct the range in braces, or upload what is missing")
            return
    shards = f"{found.num_shards} shard{'s' if found.num_shards > 1 else ''}"
    first = f"the first sample is {found.first_key}: {found.first_caption[:60]!r}"
    yield ok("shards", f"{source.name}: {shards}, {first}")


def check_index(source: Source, found: SourceSummary) -> Iterator[Finding]:
    key = source.data.caption_key
    if source.data.verify == "off":
        yield ok("index", f"{source.name}: data.verify is off, so no index is looked for")
    elif found.index.without:
        line = f"clip-train index '{source.spec}'{'' if key is None else f' --caption-key {key}'}"
        lost = f"{len(found.index.without)} of {found.num_shards} shards have none, so damage in them goes unseen"
        counted = f", and {len(found.index.uncounted)} have to be counted first" if found.index.uncounted else ""
        yield warning("index", f"{source.name}: {lost}{counted}", line)
    else:
        yield ok("index", f"{source.name}: {found.index.describe()}")


def check_captions(source: Source, found: SourceSummary, storage: StorageConfig, seconds: float) -> Iterator[Finding]:
    """How many of the first samples have one, and how fast they are read."""
    began = time.monotonic()
    seen = bad = size = 0
    reasons: dict[str, int] = {}
    with open_shard(found.first_shard, Reading(storage, found.index.checksums)) as file:
        for sample in iter_samples(file):
            seen += 1
            size += sum(len(member) for member in sample.members.values())
            try:
                if not caption(sample.members, source.data.caption_key).strip():
                    raise InvalidSample("an empty caption")
            except InvalidSample as e:
                bad += 1
                reasons[e.reason] = reasons.get(e.reason, 0) + 1
            if seen >= LOOK_AT or time.monotonic() - began > seconds:
                break
    rate = size / max(time.monotonic() - began, 1e-6) / 1e6
    message = f"{source.name}: {seen - bad} of the first {seen} samples have one, read at {rate:.0f} MB/s"
    if bad > source.data.bad_sample_limit * seen:
        why = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
        yield error(
            "captions", f"{message} ({why})", "data.caption_key names the key of the .json; or write the shards again"
        )
    else:
        yield ok("captions", message)


def check_store(config: RunConfig, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[Finding]:
    """What a run does before its model is built: is checkpoint.remote fit for checkpoints?

    patience_seconds: how long one operation is tried.
    """
    remote = config.checkpoint.remote
    if remote is None:
        shards = "" if any(is_remote(each.spec) for each in sources(config.data)) else ", and no remote shards"
        yield ok("S3", f"no checkpoint.remote in this recipe: checkpoints stay in {config.run_dir}{shards}")
        return
    storage = open_storage(remote, patience_seconds=patience_seconds)
    for trial in try_all(storage):
        make = error if trial.error is not None else warning
        message = f"checkpoint.remote ({storage.url}) {trial.result}"
        yield make("S3", message, trial.remedy) if trial.remedy else ok("S3", message)


def check_recipe(config: RunConfig) -> Iterator[Finding]:
    from launcher.config.validate import check

    world = max(1, detect(os.environ).world_size, torch.cuda.device_count())
    for mistake in package(config.engine.kind).mistakes_here(config.engine):
        yield warning("recipe", mistake, "see the message; nothing, where the run has GPUs")
    checked = check(config, world, read_data=False)
    plan = checked.plan
    yield ok(
        "recipe",
        f"global batch {plan.global_size} = {world} ranks x {plan.per_rank}, {checked.streams} streams; "
        f"{config.steps} steps",
    )


def check_disk(config: RunConfig) -> Iterator[Finding]:
    run_dir = config.run_dir.absolute()
    folder = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    probe = folder / f".doctor-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        skew = probe.stat().st_mtime - time.time()  # the file server's clock
        probe.unlink()
    except OSError as e:
        yield error("disk", f"{folder} cannot be written: {e}", "choose another run.dir")
        return
    if abs(skew) > 5:
        message = f"files in {folder} are dated {skew:+.0f} s from this machine's clock"
        yield warning("disk", message, "synchronise both clocks (chronyd)")
    needed = 12 * count_parameters(config.model.architecture()) * (config.checkpoint.keep_last + 1)
    free = shutil.disk_usage(folder).free
    message = f"{free / 1e9:.1f} GB free for run.dir, {needed / 1e9:.1f} needed by checkpoints"
    if needed > free:
        yield error("disk", message, "make room, choose another run.dir, or lower checkpoint.keep_last")
    else:
        yield ok("disk", message)
    local = next((path for path in load_site(None).local_paths if run_dir.is_relative_to(path)), None)
    if local is not None and shutil.which("sbatch") is not None:
        message = f"run.dir ({run_dir}) is under {local}, which each node has for itself"
        yield warning("disk", message, "choose a shared folder")
    if (run_dir / STOP_FILE).exists():
        yield error("run", f"{run_dir / STOP_FILE} is there: training would stop at once", f"rm {run_dir / STOP_FILE}")


RECIPE: tuple[tuple[str, Callable[[RunConfig], Iterator[Finding]]], ...] = (
    ("recipe", check_recipe),
    ("shards", check_shards),
    ("S3", check_store),
    ("disk", check_disk),
)
