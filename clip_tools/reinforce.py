"""`clip-train reinforce`: shards with teachers' features, stored augmentations, synthetic captions.

Each sample keeps its members and gets DataCompDR's (arXiv 2311.17049): `.paug.json` with A
augmentations, `.syn.json` with S captions that a model wrote, and `.npz` with `image_emb` [A, F]
and `text_emb` [1 + S, F], where F is the width of all teachers together. `data.reinforced` trains
on them. The draws for a sample depend on its key alone.
"""

import argparse
import contextlib
import io
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from clip_tools.embed import Loaded, load
from clip_tools.inspect import as_ranks
from clip_train import dist
from clip_train.data import decode
from clip_train.data.config import existing
from clip_train.data.images import TrainTransform
from clip_train.data.invalid import Invalid, InvalidSample
from clip_train.data.pixels import Alpha
from clip_train.data.reader import read_shard
from clip_train.data.tar import TarSample, write_shards
from clip_train.errors import UserError
from clip_train.storage.redact import redact
from clip_train.storage.urls import open_storage
from launcher.runtime.log import log, warn

SETTINGS = "reinforced.json"  # beside the shards: the options that made them


def run(args: argparse.Namespace) -> int:
    """Write every missing shard; under torchrun each rank writes its share."""
    places, count = (args.teacher or "").split(","), args.augmentations
    if not all(places) or not args.to or not 1 <= count <= 1000 or not 0 < args.crop <= 1:
        raise UserError(
            f"--teacher ({args.teacher}) and --to ({args.to}) must be given, --augmentations "
            f"({count}) be from 1 to 1000, and --crop ({args.crop}) from 0 to 1"
        )
    if args.alpha not in get_args(Alpha):
        raise UserError(f"--alpha ({args.alpha}) must be white or drop, as data.alpha in training")
    sources = [source for spec in args.shards for source in existing(spec, "SHARDS")]
    shards = {Path(shard).name: shard for source in sources for shard in source}
    if len(shards) < sum(map(len, sources)):
        raise UserError(f"SHARDS ({' '.join(args.shards)}): two have one name; write them apart")
    with as_ranks(args) as device:
        teachers = [load(place, device=str(device)) for place in places]
        sizes = {teacher.image_size for teacher in teachers}
        if len(sizes) > 1:
            raise UserError(
                f"--teacher ({args.teacher}): teachers of one shard see the same pixels, and their "
                f"image_size is {sizes}; write shards for each"
            )
        share = [*shards.items()][dist.rank() :: dist.world_size()]
        dist.agreed(partial(write_missing, share, teachers, args))
        if dist.is_main():
            widths = [teacher.texts([""]).shape[1] for teacher in teachers]
            scales = [
                round(teacher.model.get_parameter("logit_scale").exp().item(), 4)
                for teacher in teachers
            ]
            alpha = "" if args.alpha == "white" else f" data.alpha={args.alpha}"
            print(
                f"next: clip-train index '{args.to}/*.tar', and train with "
                f"data.train='{args.to}/*.tar' data.reinforced='{widths}' "
                f"loss.teacher_scales='{scales}'{alpha}"
            )
    return 0


def write_missing(
    share: Iterable[tuple[str, str]], teachers: Sequence[Loaded], args: argparse.Namespace
) -> None:
    """share: the names of shards and their sources. Each shard is written completely or not at all.
    UserError if the shards at `args.to` were made from other inputs."""
    store = open_storage(args.to)
    options = ("augmentations", "crop", "synthetic_key", "half")  # that change a shard
    made_with = {name: getattr(args, name) for name in options}
    if args.alpha != "white":
        made_with["alpha"] = args.alpha
    # a run has newer checkpoints
    made_with["teachers"] = [each.source for each in teachers]
    settings = json.dumps(redact(made_with)).encode()  # a teacher's URL may be signed
    if not store.put_bytes(SETTINGS, settings, if_absent=True):
        before = store.read_bytes(SETTINGS)
        if before != settings:
            raise UserError(
                f"--to ({args.to}) holds shards made with {before.decode()}, not with "
                f"{settings.decode()}; give another place"
            )
    for name, shard in share:
        if not store.exists(name):
            with tempfile.TemporaryDirectory(prefix="clip-train-") as folder:
                samples = reinforced(shard, teachers, args)
                write_shards(folder, samples, len(samples), "shard")
                store.put_file(Path(folder, "shard"), name)
            log(f"{name}: {len(samples):,} samples")


@torch.no_grad()
def reinforced(
    shard: str, teachers: Sequence[Loaded], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The samples of a shard that can be used, with their new members. UserError if none can."""
    transform = TrainTransform(teachers[0].image_size, scale=(args.crop, 1.0))
    left_out: Counter[str] = Counter()
    written: list[dict[str, Any]] = []
    dtype = torch.half if args.half else torch.float
    for sample in read_shard(shard):
        try:
            members, pixels, texts = prepared(sample, transform, args)
        except InvalidSample as e:
            left_out[str(e)] += 1
            continue
        image = torch.cat([each.pixels(pixels).to("cpu", dtype) for each in teachers], dim=1)
        text = torch.cat([each.texts(texts).to("cpu", dtype) for each in teachers], dim=1)
        content = io.BytesIO()
        np.savez(content, image_emb=image.numpy(), text_emb=text.numpy())
        written.append({**members, decode.FEATURES: content.getvalue()})
    if left_out:
        warn(f"{shard}: left out {dict(left_out)}")
    if not written:
        raise UserError(f"SHARDS ({shard}): no sample can be used: {dict(left_out)}; repair it")
    return written


def prepared(
    sample: TarSample | Invalid, transform: TrainTransform, args: argparse.Namespace
) -> tuple[dict[str, Any], Tensor, list[str]]:
    """The sample's members, its augmented images, uint8 [A, 3, S, S], and its 1 + S captions.
    InvalidSample."""
    if isinstance(sample, Invalid) or sample.duplicate:
        raise InvalidSample(sample.reason if isinstance(sample, Invalid) else "duplicate key")
    image = decode.image_of(sample.members, alpha=args.alpha)
    texts = decode.texts_of(sample.members, None)
    with contextlib.suppress(InvalidSample):  # it may have none
        texts += decode.captions(sample.members, args.synthetic_key)[args.synthetic_key]
    rng = random.Random(sample.key)
    height, width = image.shape[1:]
    chosen = [[transform.crop(height, width, rng)] for _ in range(args.augmentations)]
    members = {**sample.members, "__key__": sample.key, "txt": texts[0]}
    members.pop("pth.gz", None)
    members[decode.AUGMENTATIONS] = json.dumps({"param_aug": chosen}).encode()
    members[decode.SYNTHETIC_TEXTS] = json.dumps({"syn_text": texts[1:]}).encode()
    return members, torch.stack([transform.stored(image, each) for each in chosen]), texts
