"""A loop of your own on this project's loader: killed at any moment, it continues with the next batch.

    python examples/own_loop.py SHARDS FOLDER STEPS [WORKERS]

FOLDER keeps the last state. Another number of workers, other ranks, or moved shards change nothing.
examples/lightning_loader.py is the same with Lightning.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import webdataset
from torch import nn

from clip_train.data.config import DataConfig
from clip_train.data.loader import TrainLoader
from clip_train.inputs import unpack
from clip_train.library import contrastive_step


def tidied(sample):
    return {**sample, "txt": sample["txt"].strip().lower()}


def file_size(sample):
    """A field beside image and text."""
    return len(sample["jpg"]) / 1024


tidy = webdataset.map(tidied)  # a stage, in the workers
file_size.shape, file_size.dtype = (), torch.float64


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(3 * 32 * 32, 32), nn.Embedding(49408, 32)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, inputs, texts):
        image = self.image(inputs["image"].flatten(1) / 255)  # also has inputs["kib"], [b]
        return (
            F.normalize(image, dim=-1),
            F.normalize(self.text(texts).mean(1), dim=-1),
            self.logit_scale.exp(),
        )


def make_loader(shards, workers):
    config = DataConfig(
        train=shards,
        workers=workers,
        lanes=8,
        stages=["examples.own_loop.tidy"],
        inputs={"image": "image", "kib": "examples.own_loop.file_size"},
    )
    return TrainLoader(config, image_size=32, context_length=16, global_size=64, seed=0)


def gradient(model, loader, batch):
    """Adds the gradient of a batch, and prints what was in it."""
    inputs = unpack(batch.images, loader.layout)
    loss = contrastive_step(model, inputs, batch.texts, micro_size=16)
    seen = hashlib.sha256(" ".join(batch.keys).encode()).hexdigest()[:12]
    print(
        f"step {loader.step} samples {seen} {inputs['kib'].sum():.3f} loss {loss:.6f}", flush=True
    )


def main(shards, folder, steps, workers):
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    file = folder / "state.pt"
    with make_loader(shards, workers) as loader:
        if file.exists():
            state = torch.load(file)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["data"])
        while loader.step < steps:
            optimizer.zero_grad()
            gradient(model, loader, next(loader))
            optimizer.step()
            if loader.step % 4 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "data": loader.state_dict()}, f"{file}.new")
                os.replace(f"{file}.new", file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int((*sys.argv, 0)[4]))
