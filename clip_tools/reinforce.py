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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from clip_tools.embed import Loaded, load
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
from launcher.cli.arguments import add_help, add_shards, path_or_url, paths_or_urls
from launcher.cli.process import Process
from launcher.runtime.log import log, warn

SETTINGS = "reinforced.json"  # beside the shards: the options that made them


@dataclass(frozen=True)
class Options:
    """What is written for each sample."""

    augmentations: int  # of each image
    crop: float  # the smallest fraction of an image in a crop
    synthetic_key: str  # where synthetic captions are, as `data.caption_key`
    alpha: Alpha  # transparent pixels, as `data.alpha`
    half: bool  # features with 16 bits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write SHARDS again: each sample with stored augmentations, and with the features that one or
        more teachers have of each of them and of its captions. data.reinforced trains on them. Under
        torchrun each rank writes its share. The same line again continues after an interruption. A
        teacher is any PLACE that evaluate takes.
        """,
        """
        clip-train reinforce 'cc12m/*.tar' --teacher open_clip:ViT-L-14/openai --to cc12m-dr
        clip-train reinforce 's3://b/{00..99}.tar' --teacher runs/large,runs/other --to s3://b/dr
        """,
    )
    add_shards(parser)
    parser.add_argument(
        "--teacher",
        metavar="PLACES",
        type=paths_or_urls,
        help="the teachers, separated by commas",
    )
    parser.add_argument(
        "--to", metavar="PLACE", type=path_or_url, help="the folder or URL for the shards"
    )
    parser.add_argument(
        "--augmentations",
        metavar="N",
        type=int,
        default=10,
        help="augmentations per image (default: 10)",
    )
    parser.add_argument(
        "--crop",
        metavar="AREA",
        type=float,
        default=0.08,
        help="the smallest fraction of an image in a crop (default: 0.08)",
    )
    parser.add_argument(
        "--synthetic-key",
        metavar="NAME",
        default="syn.json",
        help="where synthetic captions are, as data.caption_key (default: syn.json)",
    )
    parser.add_argument(
        "--alpha",
        metavar="KIND",
        default="white",
        help="transparent pixels, as data.alpha in training: white or drop (default: white)",
    )
    parser.add_argument(
        "--half",
        action="store_true",
        help="write features with 16 bits; loss curves then differ by this rounding",
    )


def run(
    shards: list[str],
    teacher: str | None,
    to: str | None,
    augmentations: int,
    crop: float,
    synthetic_key: str,
    alpha: Any,
    half: bool,
    process: Process,
) -> int:
    """Write every missing shard; under torchrun each rank writes its share."""
    places = (teacher or "").split(",")
    if not all(places) or not to or not 1 <= augmentations <= 1000 or not 0 < crop <= 1:
        raise UserError(
            f"--teacher ({teacher}) and --to ({to}) must be given, --augmentations "
            f"({augmentations}) be from 1 to 1000, and --crop ({crop}) from 0 to 1"
        )
    if alpha not in get_args(Alpha):
        raise UserError(f"--alpha ({alpha}) must be white or drop, as data.alpha in training")
    sources = [source for spec in shards for source in existing(spec, "SHARDS")]
    shard_of = {Path(shard).name: shard for source in sources for shard in source}
    if len(shard_of) < sum(map(len, sources)):
        raise UserError(f"SHARDS ({' '.join(shards)}): two have one name; write them apart")
    options = Options(augmentations, crop, synthetic_key, alpha, half)
    with process.as_rank() as device:
        teachers = [load(place, device=str(device)) for place in places]
        sizes = {each.image_size for each in teachers}
        if len(sizes) > 1:
            raise UserError(
                f"--teacher ({teacher}): teachers of one shard see the same pixels, and their "
                f"image_size is {sizes}; write shards for each"
            )
        share = [*shard_of.items()][dist.rank() :: dist.world_size()]
        dist.agreed(partial(write_missing, to, share, teachers, options))
        if dist.is_main():
            widths = [each.texts([""]).shape[1] for each in teachers]
            scales = [
                round(each.model.get_parameter("logit_scale").exp().item(), 4) for each in teachers
            ]
            alpha_key = "" if alpha == "white" else f" data.alpha={alpha}"
            print(
                f"next: clip-train index '{to}/*.tar', and train with "
                f"data.train='{to}/*.tar' data.reinforced='{widths}' "
                f"loss.teacher_scales='{scales}'{alpha_key}"
            )
    return 0


def write_missing(
    to: str, share: Iterable[tuple[str, str]], teachers: Sequence[Loaded], options: Options
) -> None:
    """share: the names of shards and their sources. Each shard is written completely or not at all.
    UserError if the shards at `to` were made from other inputs."""
    store = open_storage(to)
    made_with: dict[str, Any] = {
        "augmentations": options.augmentations,
        "crop": options.crop,
        "synthetic_key": options.synthetic_key,
        "half": options.half,
    }
    if options.alpha != "white":
        made_with["alpha"] = options.alpha
    if all_squash(teachers):  # shards of earlier versions have other crops
        made_with["squash"] = True
    # a run has newer checkpoints
    made_with["teachers"] = [each.source for each in teachers]
    settings = json.dumps(redact(made_with)).encode()  # a teacher's URL may be signed
    if not store.put_bytes(SETTINGS, settings, if_absent=True):
        before = store.read_bytes(SETTINGS)
        if before != settings:
            raise UserError(
                f"--to ({to}) holds shards made with {before.decode()}, not with "
                f"{settings.decode()}; give another place"
            )
    for name, shard in share:
        if not store.exists(name):
            with tempfile.TemporaryDirectory(prefix="clip-train-") as folder:
                samples = reinforced(shard, teachers, options)
                write_shards(folder, samples, len(samples), "shard")
                store.put_file(Path(folder, "shard"), name)
            log(f"{name}: {len(samples):,} samples")


def all_squash(teachers: Sequence[Loaded]) -> bool:
    """Whether all teachers were trained on squashed images: crops then keep the image's ratio."""
    return all(each.resize.resize_mode == "squash" for each in teachers)


@torch.no_grad()
def reinforced(shard: str, teachers: Sequence[Loaded], options: Options) -> list[dict[str, Any]]:
    """The samples of a shard that can be used, with their new members. UserError if none can."""
    transform = TrainTransform(
        teachers[0].image_size, scale=(options.crop, 1.0), relative_ratio=all_squash(teachers)
    )
    left_out: Counter[str] = Counter()
    written: list[dict[str, Any]] = []
    dtype = torch.half if options.half else torch.float
    for sample in read_shard(shard):
        try:
            members, pixels, texts = prepared(sample, transform, options)
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
    sample: TarSample | Invalid, transform: TrainTransform, options: Options
) -> tuple[dict[str, Any], Tensor, list[str]]:
    """The sample's members, its augmented images, uint8 [A, 3, S, S], and its 1 + S captions.
    InvalidSample."""
    if isinstance(sample, Invalid) or sample.duplicate:
        raise InvalidSample(sample.reason if isinstance(sample, Invalid) else "duplicate key")
    image = decode.image_of(sample.members, alpha=options.alpha)
    texts = decode.texts_of(sample.members, None)
    with contextlib.suppress(InvalidSample):  # it may have none
        texts += decode.captions(sample.members, options.synthetic_key)[options.synthetic_key]
    rng = random.Random(sample.key)
    height, width = image.shape[1:]
    chosen = [[transform.crop(height, width, rng)] for _ in range(options.augmentations)]
    members = {**sample.members, "__key__": sample.key, "txt": texts[0]}
    members.pop("pth.gz", None)
    members[decode.AUGMENTATIONS] = json.dumps({"param_aug": chosen}).encode()
    members[decode.SYNTHETIC_TEXTS] = json.dumps({"syn_text": texts[1:]}).encode()
    return members, torch.stack([transform.stored(image, each) for each in chosen]), texts
