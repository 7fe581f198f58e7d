"""examples/own_loop.py with Lightning, whose checkpoints keep the loader's position.

    python examples/lightning_loader.py SHARDS FOLDER STEPS [WORKERS]

A loader without a length makes Lightning fetch one batch ahead, so that its checkpoints would leave
out a batch. `Steps` has a length.
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.own_loop import Towers, gradient, make_loader


class Steps:
    """A `TrainLoader` of which Lightning knows the length."""

    def __init__(self, loader, steps):
        self.loader, self.steps = loader, steps

    def __len__(self):
        return self.steps

    def __iter__(self):
        return self.loader

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


class Contrastive(lightning.LightningModule):
    def __init__(self, loader):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.loader = Towers(), loader

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        gradient(self.model, self.loader, batch)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(shards, folder, steps, workers):
    torch.manual_seed(0)
    keep = ModelCheckpoint(folder, save_last=True, every_n_train_steps=4, save_top_k=0)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, callbacks=[keep], logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    last = folder / "last.ckpt"
    with make_loader(shards, workers) as loader:
        resumed = str(last) if last.exists() else None
        trainer.fit(Contrastive(loader), Steps(loader, steps), ckpt_path=resumed)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int((*sys.argv, 0)[4]))
