"""What `clip-train doctor RECIPE` looks at besides: the recipe, its shards and captions, its stores, its disk."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from clip_tools.doctor.machine import slurm_answers
from clip_train.checkpoint.config import try_all
from clip_train.data.config import DataConfig, SourceSummary, check_source
from clip_train.data.decode import caption
from clip_train.data.invalid import InvalidSample
from clip_train.data.shards import Reading, open_shard, split_sources, synthetic_size
from clip_train.data.tar import iter_samples
from clip_train.errors import UserError
from clip_train.storage.config import StorageConfig
from clip_train.storage.urls import is_remote, open_storage
from launcher.checks import Finding, check_disk, check_places, error, ok, warning, warning_if
from launcher.config.recipe import RunConfig
from launcher.config.validate import check, labels_of
from launcher.engines import find_engine, on_this_machine
from launcher.runtime.environment import detect
from launcher.runtime.verdict import STOP_FILE
from launcher.slurm.profile import load_site

LOOK_AT = 200  # samples of a source's first shard
LOOK_SECONDS = 3.0  # at all sources together
PATIENCE_SECONDS = 5.0  # of the store, less than a run has


def sources(data: DataConfig) -> Iterator[tuple[str, str, DataConfig]]:
    """Of data.train and data.val each of the parts that `::` joins: the key, which of several it is, and the section of
    it alone, as data.train."""
    for key, spec in (("data.train", data.train), ("data.val", data.val)):
        parts = split_sources(spec) if spec is not None else []
        for number, part in enumerate(parts):
            weights = data.train_weights if key == "data.train" else None
            weight = f", weight {weights[number]:g}" if weights else ""
            which = f"source {number + 1} of {len(parts)}{weight}: " if len(parts) > 1 else ""
            alone = {"train": part, "val": None, "train_weights": None, "resampled": False}
            yield key, which, data.model_copy(update=alone)


def check_shards(config: RunConfig) -> Iterator[Finding]:
    """Of every source its shards, its index and its captions; a mistake in one does not hide the others."""
    storage = config.storage.model_copy(update={"attempts": min(3, config.storage.attempts)})
    each = list(sources(config.data))
    for key, which, data in each:
        name = f"{which}{key} ({data.train})"
        last = data.train
        try:
            found = check_source(data, storage)
            last = found.index.shards[-1]
            if synthetic_size(last) is not None:
                yield ok("shards", f"{name}: {found.index.describe()}")
                continue
            if is_remote(
                last
            ):  # these are not listed: a range of braces that is too long shows here
                with open_shard(last, Reading(storage)) as file:
                    file.read(512)
        except UserError as e:
            message = which + str(e).replace("data.train", key, 1)
            yield error(
                "shards", message, "see the message; `clip-train index --check` reads all of them"
            )
            continue
        except OSError as e:
            message = f"{name}: {last} cannot be read ({type(e).__name__}: {e})"
            yield error("shards", message, "correct the range in braces, or upload what is missing")
            continue
        first = f"the first sample is {found.first_key}: {found.first_caption[:60]!r}"
        yield ok(
            "shards", f"{name}: {found.num_shards} shard{'s' * (found.num_shards > 1)}, {first}"
        )
        if key == "data.train":
            yield from check_index(name, data, found)
        yield from check_captions(name, data, found, storage, LOOK_SECONDS / len(each))


def check_index(name: str, data: DataConfig, found: SourceSummary) -> Iterator[Finding]:
    if data.verify == "off":
        yield ok("index", f"{name}: data.verify is off, so no index is looked for")
        return
    missing, uncounted = len(found.index.without), len(found.index.uncounted)
    message = found.index.describe()
    if missing:
        counted = f", and {uncounted} have to be counted first" if uncounted else ""
        message = f"{missing} of {found.num_shards} shards have none, so damage in them goes unseen{counted}"
    names = [data.caption_key] if isinstance(data.caption_key, str) else data.caption_key or []
    with_key = f" --caption-key {','.join(names)}" if names else ""
    yield warning_if(
        bool(missing), "index", f"{name}: {message}", f"clip-train index '{data.train}'{with_key}"
    )


def check_captions(
    name: str, data: DataConfig, found: SourceSummary, storage: StorageConfig, seconds: float
) -> Iterator[Finding]:
    """How many of the first samples have one, and how fast they are read."""
    began = time.monotonic()
    seen = size = 0
    bad: Counter[str] = Counter()  # by the reason
    with open_shard(found.first_shard, Reading(storage, found.index.checksums)) as file:
        for sample in iter_samples(file):
            seen += 1
            size += sum(len(member or b"") for member in sample.members.values())
            try:
                caption(sample.members, data.caption_key)
            except InvalidSample as e:
                bad[e.reason] += 1
            if seen >= LOOK_AT or time.monotonic() - began > seconds:
                break
    rate = size / max(time.monotonic() - began, 1e-6) / 1e6
    why = ", ".join(f"{reason} {count}" for reason, count in (+bad).items())
    message = f"{name}: {seen - bad.total()} of the first {seen} samples have one, read at {rate:.0f} MB/s"
    message += f" ({why})" if why else ""
    remedy = "data.caption_key names the member or the key of the .json; or write the shards again"
    wrong = bad.total() > data.bad_sample_limit * seen
    yield error("captions", message, remedy) if wrong else ok("captions", message)


def check_classes(config: RunConfig) -> Iterator[Finding]:
    """Have the first samples that are evaluated on labels that are classes?"""
    for seen in labels_of(config):
        message = f"{seen.key} ({seen.place}): {seen.labelled} of the first {seen.samples} samples have a class"
        remedy = "docs/evaluation.md shows how samples are labelled; or set evaluate.zero_shot_classes=null"
        yield warning_if(not seen.labelled, "labels", message, remedy)


def check_store(config: RunConfig, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[Finding]:
    """What a run does before its model is built: is checkpoint.remote fit for checkpoints?

    patience_seconds: how long one operation is tried.
    """
    remote = config.checkpoint.remote
    if remote is None:
        yield ok("S3", f"no checkpoint.remote in this recipe: checkpoints stay in {config.run_dir}")
        return
    storage = open_storage(remote, patience_seconds=patience_seconds)
    for trial in try_all(storage):
        make = error if trial.error is not None else warning
        message = f"checkpoint.remote ({storage.url}) {trial.result}"
        yield make("S3", message, trial.remedy) if trial.remedy else ok("S3", message)


def check_recipe(config: RunConfig) -> Iterator[Finding]:
    world = max(1, detect(os.environ).world_size, torch.cuda.device_count())
    lacking = [
        *find_engine(config.engine.kind).mistakes_here(on_this_machine(config.engine)),
        *config.log.mistakes_here(),
    ]
    for mistake in lacking:
        yield warning("recipe", mistake, "see the message; nothing, where the run has GPUs")
    checked = check(config, world, read_data=False)
    plan = checked.plan
    yield ok(
        "recipe",
        f"global batch {plan.global_size} = {world} ranks x {plan.per_rank}, {checked.streams} streams; "
        f"{config.steps} steps",
    )


def check_run_dir(config: RunConfig) -> Iterator[Finding]:
    yield from check_disk(config)
    if shutil.which("sbatch") is not None and slurm_answers():
        yield from check_places(config, load_site(None))
    stop_file = config.run_dir.absolute() / STOP_FILE
    if stop_file.exists():
        yield error("run", f"{stop_file} is there: training would stop at once", f"rm {stop_file}")


RECIPE: tuple[tuple[str, Callable[[RunConfig], Iterator[Finding]]], ...] = (
    ("recipe", check_recipe),
    ("shards", check_shards),
    ("labels", check_classes),
    ("S3", check_store),
    ("disk", check_run_dir),
)
