"""`clip-train caption`: captions of the images in a folder, written by a CoCa."""

import argparse
import json
import os
from pathlib import Path

import torch

from clip_tools.embed import load
from clip_train.data.decode import IMAGE_EXTENSIONS, decode_image
from clip_train.data.images import crop_for_evaluation
from clip_train.data.invalid import InvalidSample
from clip_train.data.validation import extension_of
from clip_train.errors import UserError
from launcher.runtime.log import warn

BATCH = 64  # images


def run(args: argparse.Namespace) -> int:
    """Print a line of JSON for each image of `args.images`, and of the folders in it, by name: its
    file and its caption. 1 if one cannot be read."""
    files = [
        Path(folder, name)
        for folder, _, names in sorted(os.walk(args.images))
        for name in sorted(names)
        if extension_of(name) in IMAGE_EXTENSIONS
    ]
    if not files:
        raise UserError(f"--images ({args.images}): no folder with images; correct it")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(
        args.place,
        *args.overrides,
        weights=args.weights,
        step=args.step,
        ema=args.ema,
        device=device,
    )
    status = 0
    for start in range(0, len(files), BATCH):
        images = {}
        for file in files[start : start + BATCH]:
            try:
                image = decode_image(file.read_bytes())
                images[file] = crop_for_evaluation(image, model.image_size)
            except (InvalidSample, OSError) as e:
                status = 1
                warn(f"{file} cannot be read: {e}")
        captions = model.captions(torch.stack([*images.values()])) if images else []
        for file, caption in zip(images, captions, strict=True):
            print(json.dumps({"file": str(file), "caption": caption}, ensure_ascii=False))
    return status
