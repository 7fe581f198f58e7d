"""A loop of your own with Accelerate: `contrastive_step` in place of `accelerator.backward(loss)`.

python examples/accelerate_loop.py
accelerate launch --num_processes 2 --cpu examples/accelerate_loop.py
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
"""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
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


accelerator = Accelerator()
torch.manual_seed(0)  # the same data and weights on every rank; Accelerate deals the batches
data = TensorDataset(torch.randn(96, 48), torch.randn(96, 20))
model = TwoTowers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(
    data, batch_size=48 // accelerator.num_processes
)  # 48 samples in a global batch
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(10):
    for images, texts in loader:
        optimizer.zero_grad()
        loss = contrastive_step(
            model, images, texts, micro_size=8, scaler=accelerator.scaler
        )  # no backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    accelerator.print(f"step {epoch + 1} loss {loss.item():.4f}")
accelerator.wait_for_everyone()
sys.stdout.flush()
os._exit(
    0
)  # gloo's threads under DDP outlive the process group, and may abort the interpreter's end
