"""Before training: do the first samples of labelled data have labels that are classes?"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from clip_train.data import decode
from clip_train.data.decode import CaptionKey
from clip_train.data.invalid import InvalidSample
from clip_train.data.shards import Reading, expand, open_shard
from clip_train.data.tar import TarError, iter_samples
from clip_train.data.validation import ImageFolder, metadata_of
from clip_train.errors import UserError
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.zero_shot import ZeroShotClasses, label_by_number
from clip_train.storage.config import StorageConfig

LOOK_AT = 200  # samples of the first shard
LOOK_SECONDS = 3.0


@dataclass(frozen=True)
class Labelled:
    """How many of the first samples have a label."""

    key: str
    place: str
    samples: int
    labelled: int


def check_labels(
    config: EvaluateConfig, val: str | None, caption_key: CaptionKey, storage: StorageConfig
) -> list[Labelled]:
    """What the first samples of every labelled data set show. UserError where a label is not a class."""
    places = {key: place for key, place in config.labelled().items() if place is not None}
    if config.zero_shot_data is None and val is not None:
        places["data.val"] = val
    name = config.zero_shot_classes
    if name is None and config.linear_probe is None:
        return []
    classes = None if name is None else ZeroShotClasses.load(name, config.templates)
    label = label_by_number if classes is None else classes.labeller()
    found = []
    for key, place in places.items():
        folder = None if key == "data.val" else ImageFolder.find(place, key)
        if folder is not None:
            if classes is not None:
                folder.check_classes(len(classes.classnames))
            found.append(Labelled(key, place, len(folder.files), len(folder.files)))
            continue
        shard, samples, labelled = expand(place, key)[0][0], 0, 0
        end = time.monotonic() + LOOK_SECONDS
        # a shard that cannot be read is no mistake in labels
        with (
            contextlib.suppress(TarError, OSError),
            open_shard(shard, Reading(storage)) as file,
        ):
            for sample in iter_samples(file):
                caption = ""
                with contextlib.suppress(InvalidSample):
                    caption = decode.caption(sample.members, caption_key)
                try:
                    labelled += label(caption, metadata_of(sample.members)) >= 0
                except ValueError as e:
                    raise UserError(
                        f"{key}: sample {sample.key} of {shard} does not fit evaluate.zero_shot_classes ({name}): {e}; "
                        "correct the label, give the classes of this data, or set evaluate.zero_shot_classes=null"
                    ) from e
                samples += 1
                if samples == LOOK_AT or time.monotonic() > end:
                    break
        found.append(Labelled(key, place, samples, labelled))
    return found
