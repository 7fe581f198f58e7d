"""`contrastive_step` inside the Trainer of transformers: all batches of an optimizer step are one contrastive batch.

python examples/hf_trainer.py
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py

The global batch is per_device_train_batch_size x gradient_accumulation_steps x ranks. A `compute_loss` alone would take
each small batch by itself: other samples of the step would be no negatives.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from clip_train.library import contrastive_step


class ContrastiveTrainer(Trainer):
    """`model(**batch)` returns what `contrastive_step` takes, and batches are dicts of tensors."""

    def __init__(self, *args, micro_size=None, contrastive_loss=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.micro_size = micro_size
        self.contrastive_loss = contrastive_loss
        self.held = []  # batches of this step

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        self.held.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:  # more batches of this step will come
            return torch.zeros((), device=self.args.device)
        batch = {name: torch.cat([part[name] for part in self.held]) for name in self.held[0]}
        sizes = [len(next(iter(part.values()))) for part in self.held]
        self.held = []
        shares = None
        if self.args.world_size > 1:  # the last batch of an epoch may be short
            shares = [0] * self.args.world_size
            dist.all_gather_object(shares, sum(sizes))
        with self.compute_loss_context_manager():
            loss = contrastive_step(
                model,
                **batch,
                micro_size=self.micro_size or max(sizes),
                shares=shares,
                loss=self.contrastive_loss,
                scaler=getattr(self.accelerator, "scaler", None),
            )
        if self.is_deepspeed_enabled:
            model.step()  # as Accelerate's backward does
        return loss.float()


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.document = nn.Linear(48, 32), nn.Linear(20, 32)
        self.logit_scale = nn.Parameter(torch.tensor([2.66]))

    def forward(self, query, document):
        return {
            "query": F.normalize(self.query(query), dim=-1),
            "document": F.normalize(self.document(document), dim=-1),
            "logit_scale": self.logit_scale.exp(),
        }


class Pairs(Dataset):
    def __init__(self, size):
        g = torch.Generator().manual_seed(1)
        self.query = torch.randn(size, 48, generator=g)
        self.document = torch.randn(size, 20, generator=g)

    def __len__(self):
        return len(self.query)

    def __getitem__(self, i):
        return {"query": self.query[i], "document": self.document[i]}


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"step {state.global_step} loss {logs['loss']:.4f}", flush=True)


if __name__ == "__main__":
    world = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=48 // 4 // world,  # 48 samples in a global batch
        max_steps=10,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=None if torch.cuda.is_available() or world == 1 else "gloo",
    )
    # one batch, seen ten times: its samples are the same on any number of ranks
    trainer = ContrastiveTrainer(
        model=TwoTowers(),
        args=arguments,
        train_dataset=Pairs(48),
        callbacks=[Printed()],
        micro_size=8,
    )
    trainer.train()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads under DDP may abort the interpreter's end
