"""`clip-train embed`: the features of a data set, as .npy files."""

import argparse
import os
from functools import partial

from clip_train.errors import UserError
from launcher.cli.arguments import (
    add_ema,
    add_help,
    add_output,
    add_overrides,
    add_place,
    add_step,
    add_weights,
)
from launcher.cli.process import Process
from launcher.runtime.log import log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write the image and text features of data.val, with the keys and captions of the samples.
        PLACE is as for evaluate. Under torchrun each rank embeds its share.
        """,
        """
        clip-train embed runs/clip data.val='s3://bucket/{0000..0099}.tar' --output features
        clip-train embed open_clip:ViT-B-32/openai data.val='val/*.tar' --images-only
        """,
    )
    add_place(parser)
    add_overrides(parser)
    add_output(parser, "features")
    parser.add_argument(
        "--images-only",
        action="store_true",
        help="samples need no captions, and no texts are embedded",
    )
    add_weights(parser)
    add_step(parser)
    add_ema(parser)


def run(
    place: str,
    overrides: list[str],
    output: str,
    images_only: bool,
    weights: str | None,
    step: int | None,
    ema: bool,
    process: Process,
) -> int:
    """Write the features of `data.val`; under torchrun the samples are split over the ranks."""
    from clip_tools.embed import Loaded, write_features
    from clip_tools.place import weights_at
    from clip_train import dist
    from clip_train.data.config import expand_existing
    from clip_train.data.reader import count_missing
    from clip_train.data.shared import shared_index
    from clip_train.data.validation import ValLoader
    from clip_train.processes import usable_cores
    from clip_train.storage.local import LocalStorage

    with process.as_rank() as device:
        found = weights_at(place, overrides, weights, step, ema)
        config, where = found.config, found.where
        places = config.data.val_places
        if not places:
            raise UserError("data.val is null: add data.val=<the shards to embed>")
        for key, data in places.items():
            dist.on_main(partial(expand_existing, data, key))
        loaded = dist.agreed(
            Loaded.of,
            found.architecture,
            found.source,
            where=where,
            device=str(device),
            alpha=config.data.alpha,
        )
        for key, data in places.items():
            loader = ValLoader(
                count_missing(
                    shared_index(key, data, config.data.verify, config.storage), config.storage
                ),
                image_size=loaded.image_size,
                context_length=found.architecture.text_cfg.context_length,
                batch_size=config.evaluate.batch_size,
                rank=dist.rank(),
                world_size=dist.world_size(),
                caption_key=config.data.caption_key,
                labelled=images_only,
                workers=usable_cores(),
                storage=config.storage,
                tokenizer=loaded.tokenizer,
                stages=config.data.stages,
                inputs=config.data.inputs,
                alpha=config.data.alpha,
                resize=loaded.resize,
                patches=loaded.patches,
            )
            name = key.removeprefix("data.val").removeprefix(".")  # of a set: its own folder
            store = LocalStorage(os.path.join(output, name))
            written = dist.agreed(write_features, loaded, loader, store, f"{dist.rank():05d}")
            total, invalid = dist.sum_scalars(written, len(loader.invalid))
            if dist.is_main():
                log(f"{where}: {total:.0f} samples embedded, {invalid:.0f} could not be used")
                print(store.url)
    return 0
