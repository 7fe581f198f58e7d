"""`clip-train doctor [RECIPE]`: what will go wrong, before it does.

Each line is ok, a warning or an error with the remedy.
"""

import argparse
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch
from rich.console import Console
from rich.text import Text

from clip_tools.machine import MACHINE, slurm_answers
from clip_train.data.config import check_source
from clip_train.data.shards import Reading, open_shard, synthetic_size
from clip_train.errors import UserError
from clip_train.storage.urls import is_remote
from launcher.checks import (
    Check,
    Finding,
    check_disk,
    check_places,
    check_store,
    error,
    ok,
    warning,
    warning_if,
)  # fmt: skip
from launcher.config.recipe import RunConfig, load_config
from launcher.config.resolve import labels_of, resolve
from launcher.engines import find_engine, on_this_machine
from launcher.engines.config import EngineConfig
from launcher.runtime.environment import detect
from launcher.runtime.verdict import STOP_FILE
from launcher.slurm.profile import load_site

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def run(args: argparse.Namespace) -> int:
    """Returns 1 if there is an error, else 0."""
    findings, console = [], Console()
    for finding in look(args.recipe, args.overrides):
        findings.append(finding)
        if not args.json:
            text = Text(f"{finding.level:8}", style=COLOURS[finding.level])
            text.append(f"{finding.check}: {finding.message}", style="default")
            if finding.remedy:
                text.append(f" -> {finding.remedy}", style="bold")
            console.print(text, soft_wrap=True)
    counts: Counter[str] = Counter(finding.level for finding in findings)
    worst = max(counts, key=[*COLOURS].index)
    if args.json:
        print(json.dumps({"worst": worst, "findings": [*map(asdict, findings)]}, indent=2))
    else:
        line = ", ".join(f"{counts[level]} {level}" for level in COLOURS)
        more = "" if args.recipe else "; with a recipe also shards, captions, S3 and disk"
        console.print(line + more)
    return int(worst == "error")


def look(recipe: str | None, overrides: list[str]) -> Iterator[Finding]:
    """At the machine, the recipe's engine, and the recipe where there is one that can be read.

    A check that fails itself is a finding, and not the end of the others.
    """
    config = None
    checks: list[tuple[str, Check]] = [*MACHINE]
    if recipe is not None:
        try:
            config = load_config(recipe, overrides)
        except UserError as e:
            yield error("recipe", str(e), "see the message; clip-train keys lists all keys")
    engine = config.engine if config else EngineConfig()
    checks += find_engine(engine.kind).checks
    if config is not None:
        checks += [(name, partial(of_recipe, config)) for name, of_recipe in RECIPE.items()]
    for name, of_it in checks:
        try:
            yield from of_it()
        except UserError as e:
            yield error(name, str(e), "see the message")
        except Exception as e:
            remedy = "mend it, or report it if it is no fault of this machine"
            yield error(name, f"{type(e).__name__}: {e}", remedy)


def check_recipe(config: RunConfig) -> Iterator[Finding]:
    world = max(1, detect(os.environ).world_size, torch.cuda.device_count())
    engine = find_engine(config.engine.kind)
    lacking = engine.mistakes_here(on_this_machine(config.engine))
    for mistake in [*lacking, *config.log.mistakes_here()]:
        yield warning("recipe", mistake, "see the message; nothing, where the run has GPUs")
    resolved = resolve(config, world, read_data=False)
    config, plan = resolved.config, resolved.plan
    split = f"global batch {plan.global_size} = {world} ranks x {plan.per_rank}"
    yield ok("recipe", f"{split}, {config.data.lanes} streams; {config.steps} steps")


def check_shards(config: RunConfig) -> Iterator[Finding]:
    """Shards, index and a first caption of data.train and of data.val, each by itself."""
    storage = config.storage.model_copy(update={"attempts": min(3, config.storage.attempts)})
    for key in ("data.train", "data.val"):
        data = config.data
        if key == "data.val":
            val = {"train": data.val, "train_weights": None, "resampled": False}
            data = data.model_copy(update=val)
        if data.train is None:
            continue
        name = f"{key} ({data.train})"
        last = data.train
        try:
            found = check_source(data, storage)
            last = found.index.shards[-1]
            if is_remote(last):  # these are not listed: a range that is too long shows here
                with open_shard(last, Reading(storage)) as file:
                    file.read(512)
        except UserError as e:
            remedy = "see the message; `clip-train index --check` reads all of them"
            yield error("shards", str(e).replace("data.train", key, 1), remedy)
            continue
        except OSError as e:
            message = f"{name}: {last} cannot be read ({type(e).__name__}: {e})"
            yield error("shards", message, "correct the range in braces, or upload what is missing")
            continue
        shards = f"{found.num_shards} shard{'s' * (found.num_shards > 1)}"
        first = f"the first sample is {found.first_key}: {found.first_caption[:60]!r}"
        yield ok("shards", f"{name}: {shards}, {first}")
        if key == "data.train" and synthetic_size(last) is None:
            message, missing = found.index.describe(), len(found.index.without)
            if missing:
                message = f"{missing} of {shards} have none, so damage in them goes unseen"
            wrong = bool(missing) and data.verify != "off"
            yield warning_if(
                wrong, "index", f"{name}: {message}", f"clip-train index '{data.train}'"
            )


def check_classes(config: RunConfig) -> Iterator[Finding]:
    """Have the first samples that are evaluated on labels that are classes?"""
    for seen in labels_of(config):
        have = f"{seen.labelled} of the first {seen.samples} samples have a class"
        message = f"{seen.key} ({seen.place}): {have}"
        remedy = "see docs/evaluation.md; or set evaluate.zero_shot_classes=null"
        yield warning_if(not seen.labelled, "labels", message, remedy)


def check_run_dir(config: RunConfig) -> Iterator[Finding]:
    yield from check_disk(config)
    if shutil.which("sbatch") is not None and slurm_answers():
        yield from check_places(config, load_site(None))
    stop_file = config.run_dir.absolute() / STOP_FILE
    if stop_file.exists():
        yield error("run", f"{stop_file} is there: training would stop at once", f"rm {stop_file}")


RECIPE = {
    "recipe": check_recipe,
    "shards": check_shards,
    "labels": check_classes,
    "S3": check_store,
    "disk": check_run_dir,
}
