"""`clip-train evaluate`, `export` and `checkpoints`: read the results of a run without its
engine."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from rich.console import Console
from rich.table import Table

from clip_tools.exports import check_transformers, export_peft, export_transformers
from clip_tools.openclip.command import model_name
from clip_train import dist
from clip_train.checkpoint.reader import averaged
from clip_train.checkpoint.restore import Resumed, list_checkpoints, open_read_only
from clip_train.engines.base import PlainEngine
from clip_train.engines.config import describe_sharding
from clip_train.errors import UserError
from clip_train.evaluate.config import IMAGENET
from clip_train.evaluate.sets import evaluation
from clip_train.models.clip import build_model, parse_saved
from clip_train.models.config import AnyArchitecture, Architecture, load_architecture
from clip_train.models.loading import CONFIG_NAME, WEIGHTS_NAMES, file_at, names_of_models, silent
from clip_train.models.lora import Lora
from clip_train.models.openclip.config import PREFIX
from clip_train.models.weights import WholeState, export_saved, initial_weights
from clip_train.recipe.recipe import (
    RunConfig,
    apply_overrides,
    check_config,
    load_config,
)
from clip_train.recipe.resolve import check_place
from clip_train.recipe.tokenizer import tokenizer_of
from clip_train.recipe.weights import find_run, holds_weights, on_base, recipe_in, weights_here
from clip_train.storage.urls import is_remote, local_path
from clip_train.task import FragmentSource
from launcher.runtime import environment as ranks
from launcher.runtime import rendezvous
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.log import log

OWN_CODE = ("data.inputs", "data.stages")
LOOKED_AT = ("data.val", "evaluate.zero_shot_classes", "evaluate.zero_shot_data")
# The recipe of weights without a run: keys that are required, and of no use here.
NO_RUN = {"run": {"steps": 1}, "schedule": {"warmup_steps": 0}, "data": {"train": "none.tar"}}


@contextmanager
def as_ranks(args: argparse.Namespace) -> Iterator[torch.device]:
    """Yield this rank's device. Inside the block, the ranks that a launcher has started form one
    group."""
    env = ranks.detect(os.environ)
    device, _ = ranks.take_device(env)
    args.outcome.heartbeat = Heartbeat(env, args.outcome.publish)
    rendezvous.start(env, device, args.outcome.heartbeat)
    try:
        yield device
    finally:
        torch_dist.destroy_process_group()


def evaluate_run(args: argparse.Namespace) -> int:
    """Print the metrics of `clip_train.evaluate`; under torchrun the samples are split over the
    ranks.
    """
    with as_ranks(args) as device:
        config, architecture, source, where = to_evaluate(args)
        for key, place in config.evaluated_on.items():
            dist.on_main(partial(check_place, place, key))
        model = build_model(architecture)
        PlainEngine(model).load_fragments(source, {})
        tokenizer = dist.agreed(tokenizer_of, architecture)
        evaluate_once = evaluation(config, architecture, PlainEngine(model.to(device)), tokenizer)
        if evaluate_once is None:
            raise UserError(
                "data.val and evaluate.zero_shot_data are both null, so nothing can be evaluated; "
                "add data.val=<shards>, or evaluate.zero_shot_data=<folder> "
                "evaluate.zero_shot_classes=imagenet"
            )
        results = evaluate_once()
        if dist.is_main() and args.json:
            print(json.dumps({"name": config.run.name, "weights": where, **results}))
        elif dist.is_main():
            log(f"{config.run.name}, {where}:")
            for name, value in results.items():
                print(f"{name}: {value:.6g}")
    return 0


def to_evaluate(
    args: argparse.Namespace,
) -> tuple[RunConfig, AnyArchitecture, FragmentSource, str]:
    """Collective: the settings, the model, its weights, and the source of these. For a run: its
    newest checkpoint, the moving average in it, or `weights`. For weights alone, `overrides` say
    what to measure. UserError, CheckpointError.
    """
    place, overrides, weights, ema = args.place, args.overrides, args.weights, args.ema
    bare = weights is None and dist.on_main(partial(holds_weights, place))
    if weights is None and not bare:
        config, found = run_at(args)
        source: FragmentSource = found.reader
        if ema or config.model.lora is not None:
            like, read = found.reader.open_weights(ema)
            state = {name: read(name) for name in like}
            source = WholeState(on_base(found, state, config))
        return (
            config,
            parse_saved(found.state["architecture"], config.model.name),
            source,
            f"step {found.step} of {found.path}",
        )
    if ema:
        raise UserError(
            f"--ema requires a training checkpoint, not weights ({weights or place}); leave it out"
        )
    if bare:
        config = check_config(apply_overrides(NO_RUN, overrides), place)
    else:
        config = load_config(recipe_in(place) or place, overrides)
    weights = weights or place
    sources = {"init_from": weights, "init_image_from": None, "init_text_from": None}
    say = log if dist.is_main() else silent
    with weights_here(config.model.model_copy(update=sources), config.storage) as model:
        if bare and "name" not in config.model.model_fields_set:
            name = dist.agreed(partial(described, model.init_from or "", place))
            model = model.model_copy(update={"name": name})  # noqa: PLW2901
        return (
            config,
            config.architecture(model),
            dist.agreed(partial(initial_weights, model, config.run.seed, say)),
            weights,
        )


def described(weights: str, place: str) -> str:
    """The `model.name` of local weights, from the description beside them, else from their tag.
    UserError without.
    """
    path = local_path(weights)
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG_NAME).is_file():
        if place.startswith("open_clip:"):
            return model_name(place.removeprefix("open_clip:").rpartition("/")[0])
        fitting = names_of_models(file_at(path, "weights"))
        name, *others = fitting or ["ViT-B-32"]
        by_size = f"; {' and '.join([name, *others])} would fit its sizes" if fitting else ""
        raise UserError(
            f"{place} has no {CONFIG_NAME} beside it that says what model it is: give its name, as "
            f"in clip-train evaluate {place} model.name={name}{by_size}"
        )
    try:
        load_architecture(str(folder))
        return str(folder)
    except UserError:  # not one of ours
        return f"open_clip:{folder}"


def run_at(args: argparse.Namespace) -> tuple[RunConfig, Resumed]:
    """The recipe and the newest complete checkpoint. With a URL or a bare folder of
    checkpoints, the recipe comes from the checkpoint: no file of the run is needed. UserError,
    CheckpointError."""
    place, overrides = args.place, args.overrides
    config, places, only = find_run(place, overrides)
    found = open_read_only(places, args.step, only)
    if config is not None:
        return config, found
    recipe_there = found.state["recipe"]
    said = {override.partition("=")[0] for override in overrides}
    for name in (*OWN_CODE, *(LOOKED_AT if is_remote(place) else ())):
        section, key = name.split(".")
        url = recipe_there[section].get(key)
        # a remote recipe must not make this machine open or import anything
        if url not in (None, IMAGENET) and name not in said:
            raise UserError(
                f"the recipe in {found.path} names {name}={url}, which is used only if you "
                f"allow it: add {name}={url}, another, or {name}=null"
            )
    if "evaluate.functions" not in said:  # code is imported only if the command line names it
        recipe_there["evaluate"].pop("functions", None)
    config = check_config(apply_overrides(recipe_there, overrides), f"the recipe in {found.path}")
    # a class of the user's own is imported only if the command line names it
    parse_saved(found.state["architecture"], config.model.name if "model.name" in said else None)
    if is_remote(place):
        check_names(found, config.model.name, said="model.name" in said)
    return config, found


def check_names(found: Resumed, model: str, *, said: bool) -> None:
    """UserError if the model of a remote checkpoint refers to files that the user has not named.

    These are a tokenizer or model of the hub, or a local folder. The ones that OpenCLIP's model of
    this name or a model on the command line refers to are allowed.
    """

    foreign = _names(found.state["architecture"])
    openclips = model.startswith(PREFIX) and not os.path.exists(model.removeprefix(PREFIX))
    if foreign and (said or openclips):
        foreign -= _names(load_architecture(model).model_dump())
    if foreign:
        raise UserError(
            f"the model in {found.path} names {', '.join(sorted(foreign))}, which is opened only "
            "if you allow it: add model.name=<OpenCLIP's model, or a JSON, that names it as well>"
        )


def _names(architecture: dict[str, Any]) -> set[str]:
    """The tokenizer and models of the hub's, or folders, that an architecture names."""
    text, trunk = architecture["text_cfg"], architecture["vision_cfg"].get("timm_model_name") or ""
    names = {
        text.get("hf_tokenizer_name"),
        text.get("hf_model_name"),
        trunk if ":" in trunk else None,
    }
    return names - {None}


def export_run(args: argparse.Namespace) -> int:
    """Write a checkpoint's weights as a folder that `open_clip` loads."""
    config, places, only = find_run(args.place, args.overrides)
    if config is None and args.overrides:
        raise UserError(
            f"{args.overrides[0]}: a checkpoint is exported as it is; leave it out, or name the "
            "recipe"
        )
    found = open_read_only(places, args.step, only)
    folder = args.output or ("export" if config is None else str(config.run_dir / "export"))
    return write_export(args, [found], folder, config)


def average_run(args: argparse.Namespace) -> int:
    """Write the mean of checkpoints' weights as `export_run` writes one's."""
    found = []
    for each in args.checkpoints.split(","):
        place, *step = re.split(r"@(?=\d+$)", each)
        _, places, only = find_run(place, [])
        found.append(open_read_only(places, int(step[0]) if step else None, only))
    return write_export(args, found, args.output)


def write_export(
    args: argparse.Namespace,
    found: list[Resumed],
    folder: str,
    config: RunConfig | None = None,
) -> int:
    """The mean of these checkpoints as `args.format` has it; prints how it is loaded.

    config: the run's, which names the base of adapters.
    """
    description = found[0].state["architecture"]  # works even if the recipe's files have changed
    if not isinstance(description, dict):
        parse_saved(description)  # its message names the mistake
    other = description.get("own") or description.get("open_clip")
    average = partial(averaged, [each.reader for each in found], args.ema)  # fetches the weights
    if args.format == "peft":
        if not description.get("lora") or len(found) > 1:
            raise UserError(
                f"--format peft holds the adapters (model.lora) of one checkpoint, and "
                f"{found[0].path} has none, or is one of several: export with --format open_clip"
            )
        like, read = average()
        lora = Lora.model_validate(description["lora"])
        written = export_peft({name: read(name) for name in like}, lora, folder)
        line = f"peft.PeftModel.from_pretrained(model, '{written.resolve()}')"
    elif args.format == "transformers":
        architecture = None if other else parse_saved(description)
        if not isinstance(architecture, Architecture):
            raise UserError(
                f"--format transformers holds CLIP's own towers, not {other or 'a ResNet'}'s: "
                "export with --format open_clip"
            )
        check_transformers(architecture)  # before the weights are fetched
        like, read = average()
        state = on_base(found[0], {name: read(name) for name in like}, config)
        plain = architecture.model_copy(update={"lora": None})
        written = export_transformers(state, plain, folder)
        line = f"transformers.CLIPModel.from_pretrained('{written.resolve()}')"
    else:
        like, read = average()
        if description.get("lora"):
            like = on_base(found[0], {name: read(name) for name in like}, config)
            read = like.__getitem__
        written = export_saved(like, description, folder, read)
        line = f"open_clip.create_model_and_transforms('local-dir:{written.resolve()}')"
        if description.get("own"):
            line = f"safetensors.torch.load_file('{written.resolve() / WEIGHTS_NAMES[0]}')"
    steps = " and ".join(f"step {each.step} of {each.path}" for each in found)
    log(f"{'the mean of ' * (len(found) > 1)}{steps} exported to {written}")
    print(f"load it with {line}")
    return 0


def list_run(args: argparse.Namespace) -> int:
    """Print a run's committed checkpoints, here and in the remote store. 1 if one is not whole."""
    _, places, _ = find_run(args.place, args.overrides)
    lines = list_checkpoints(places, verify=args.verify)
    status = 1 if any(line["problem"] for line in lines) else 0
    urls = [storage.url for storage in places if storage is not None]
    if args.json:
        print(json.dumps({"places": urls, "checkpoints": lines}))
        return status
    console = Console(width=None if sys.stdout.isatty() else 160)
    if not lines:
        console.print("no checkpoints")
        return status
    table = Table(box=None, pad_edge=False)
    for column in ("step", "lease", "written (UTC)", "MB", "layout", "where", "state"):
        table.add_column(
            column, justify="right" if column in ("step", "MB") else "left", overflow="fold"
        )
    for line in lines:
        held = "?"
        if line["engine"] is not None:
            held = f"{line['ranks']} x {describe_sharding(line['engine'])}, {line['engine'].get('precision')}"
        table.add_row(
            str(line["step"]),
            str(line["epoch"]),
            line["created"].removesuffix("+00:00").replace("T", " "),
            f"{line['num_bytes'] / 1e6:,.1f}",
            held,
            line["where"],
            line["problem"] or ("complete, every byte verified" if args.verify else "complete"),
        )
    console.print(table)
    console.print(" ".join(["in", *urls]), soft_wrap=True)
    return status
