"""Several frames a sample: a small square moves, and the text says where to.

    python examples/frames.py DATA
    clip-train train examples/frames.yaml data.train='DATA/train/*.tar' data.val='DATA/val/*.tar'

Only all frames together tell the direction. The recipe trains with micro-batches of one sample, as
large models on many frames must; the loss is that of the whole batch all the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from torch import Tensor, nn

from clip_train.data.pixels import decode_image
from clip_train.data.tar import write_shards
from examples import audio

FRAMES, SIDE = 6, 32
WAYS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}


def frames(sample: dict) -> Tensor:
    """The members 0.jpg to 5.jpg of a sample: uint8 [6, 3, 32, 32]."""
    return torch.stack([decode_image(sample[f"{number}.jpg"]) for number in range(FRAMES)])


frames.shape, frames.dtype = (FRAMES, 3, SIDE, SIDE), torch.uint8


class FramesText(audio.AudioText):
    """For `model.name`: a CNN over time, height and width."""

    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(
            nn.Conv3d(3, 16, (3, 4, 4), stride=(1, 4, 4), padding=(1, 0, 0)), nn.GELU(),
            nn.Conv3d(16, 32, (3, 4, 4), stride=(1, 4, 4), padding=(1, 0, 0)), nn.GELU(),
            nn.Flatten(), nn.Linear(32 * FRAMES * 4, self.embed_dim),
        )  # fmt: skip

    def encode(self, inputs: dict[str, Tensor]) -> Tensor:
        clips = inputs["frames"].to(self.visual[0].weight.dtype) / 128 - 1  # [b, 6, 3, 32, 32]
        return self.visual(clips.transpose(1, 2))


def clips(rounds: int, seed: int) -> Iterator[dict]:
    """Each color in each direction `rounds` times, from any place."""
    rng = random.Random(seed)
    kinds = [(color, way) for color in COLORS for way in WAYS] * rounds
    rng.shuffle(kinds)
    for number, (color, way) in enumerate(kinds):
        place = np.array([rng.randrange(8, 18), rng.randrange(8, 18)])  # in the middle frame
        members: dict = {
            "__key__": f"{number:05d}",
            "txt": f"a {color} square moves {way}".encode(),
        }
        for frame in range(FRAMES):
            pixels = np.full((SIDE, SIDE, 3), rng.randrange(200, 250), np.uint8)
            top, left = place + (2 * frame - FRAMES) * np.array(WAYS[way])
            pixels[top : top + 8, left : left + 8] = COLORS[color]
            members[f"{frame}.jpg"] = simplejpeg.encode_jpeg(pixels)
        yield members


if __name__ == "__main__":
    data = Path(sys.argv[1])
    for part, rounds in (("train", 60), ("val", 1)):
        (data / part).mkdir(parents=True)
        write_shards(data / part, clips(rounds, seed=rounds), per_shard=240)
