"""Write shards again, with teachers' features, stored augmentations and synthetic captions.

Each sample keeps its members and gets DataCompDR's (arXiv 2311.17049): `.paug.json` with A
augmentations, `.syn.json` with S captions that a model wrote, and `.npz` with `image_emb` [A, F]
and `text_emb` [1 + S, F], where F is the width of all teachers together. `data.reinforced` trains
on them. The draws for a sample depend on its key alone.
"""

import contextlib
import io
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clip_tools.embed import Loaded
from clip_train.data import decode
from clip_train.data.images import TrainTransform
from clip_train.data.invalid import InvalidRecord, InvalidSample
from clip_train.data.pixels import Alpha
from clip_train.data.reader import read_shard
from clip_train.data.tar import TarSample, write_shards
from clip_train.errors import UserError
from clip_train.storage.redact import redact
from clip_train.storage.urls import open_storage
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
    made_with["teachers"] = [each.where for each in teachers]
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
    sample: TarSample | InvalidRecord, transform: TrainTransform, options: Options
) -> tuple[dict[str, Any], Tensor, list[str]]:
    """The sample's members, its augmented images, uint8 [A, 3, S, S], and its 1 + S captions.
    InvalidSample."""
    if isinstance(sample, InvalidRecord) or sample.duplicate:
        raise InvalidSample(sample.reason if isinstance(sample, InvalidRecord) else "duplicate key")
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
