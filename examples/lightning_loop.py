"""A loop of your own with Lightning: manual optimization, on one device or several.

    python examples/lightning_loop.py [DEVICES]

On several devices gradients stay this rank's share of a sum, whatever Lightning wraps, and are summed here.
"""

import sys

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clip_train.library import contrastive_step


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(48, 32), nn.Linear(20, 32)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, images, texts):
        return (
            F.normalize(self.image(images), dim=-1),
            F.normalize(self.text(texts), dim=-1),
            self.logit_scale.exp(),
        )


class Contrastive(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.model = TwoTowers()

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = contrastive_step(self.model, *batch, micro_size=8)  # no self.manual_backward
        if torch.distributed.is_initialized():
            for p in self.model.parameters():
                torch.distributed.all_reduce(p.grad)  # a sum, not a mean
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss)
        if self.trainer.is_global_zero and self.global_step % 2 == 0:
            print(f"step {self.global_step // 2} loss {loss.item():.4f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 48), torch.randn(96, 20))
trainer = lightning.Trainer(
    accelerator="cpu", devices=devices, max_epochs=10, use_distributed_sampler=False, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
share = range(
    trainer.global_rank, len(data), devices
)  # the same global batches on any number of devices
trainer.fit(Contrastive(), DataLoader(data, batch_size=48 // devices, sampler=share))
