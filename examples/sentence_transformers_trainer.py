"""The Trainer of sentence-transformers with `contrastive_step` as its loss: the exact gradient of all ranks' batches.

python examples/sentence_transformers_trainer.py
torchrun --standalone --nproc-per-node 2 examples/sentence_transformers_trainer.py
python examples/sentence_transformers_trainer.py plain    # MultipleNegativesRankingLoss over the same batch at once

The global batch is per_device_train_batch_size x ranks. `mini_batch_size` is what goes through the encoder at once, so
there is no reason to accumulate batches: each would be a batch of its own, as with sentence-transformers' losses.
"""

import os
import sys
import tempfile
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TrainerCallback

from clip_train import Ranking, contrastive_step


class Sides(nn.Module):
    """One encoder for queries and documents, as `contrastive_step` calls it."""

    def __init__(self, model):
        super().__init__()
        self.model = model  # perhaps wrapped by DDP, or sharded

    def forward(self, **side):  # {"query": features} or {"document": features}
        [(name, features)] = side.items()
        return {name: F.normalize(self.model(dict(features))["sentence_embedding"], dim=-1)}


class ExactRankingLoss(nn.Module):
    """In place of CachedMultipleNegativesRankingLoss, over the batches of all ranks.

    Columns are the query, its document and perhaps hard negatives. The gradient is computed in `forward`, and added to
    `.grad` in the backward of the loss, by the factor that Trainer gives it (accumulation, an fp16 scaler).
    """

    def __init__(self, model: SentenceTransformer, scale: float = 20.0, mini_batch_size: int = 32):
        super().__init__()
        self.model = model  # Trainer replaces it by the wrapped one
        self.loss = Ranking(scale=scale)
        self.mini_batch_size = mini_batch_size

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        query, *documents = sentence_features
        query, document = tensors(query), by_query([tensors(each) for each in documents])
        sides = Sides(self.model)
        if not torch.is_grad_enabled():  # an evaluation: of this rank's batch
            features = sides(query=query) | sides(document=document)
            return self.loss(features).loss.float()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        self.model.zero_grad(set_to_none=True)
        value = contrastive_step(
            sides,
            query=query,
            document=document,
            micro_size={
                "query": self.mini_batch_size,
                "document": max(1, self.mini_batch_size // len(documents)),
            },
            loss=self.loss,
            shares=shares(len(query["input_ids"])),
        )
        added = [p.grad for p in parameters]
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient

        def add(factor: Tensor) -> None:
            for p, gradient in zip(parameters, added, strict=True):
                if gradient is not None:
                    scaled = gradient * factor.item()
                    p.grad = scaled if p.grad is None else p.grad + scaled

        value = value.float().requires_grad_()
        value.register_hook(add)
        return value


def tensors(features: dict[str, Tensor]) -> dict[str, Tensor]:
    """What has a row for each text."""
    n = len(features["input_ids"])
    return {
        name: x for name, x in features.items() if isinstance(x, Tensor) and x.shape[:1] == (n,)
    }


def by_query(columns: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The documents of a query one after another, padded to one length."""
    longest = max(column["input_ids"].shape[1] for column in columns)
    return {
        name: torch.stack(
            [F.pad(column[name], (0, longest - column[name].shape[1])) for column in columns], 1
        ).flatten(0, 1)
        for name in columns[0]
    }


def shares(n: int) -> list[int] | None:
    """The samples of each rank: the last batch of an epoch may be short."""
    if not dist.is_initialized():
        return None
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, n)
    return counts


def save_small_bert() -> str:
    """A random BERT of two layers, without dropout: a plain batch would draw other masks."""
    folder = tempfile.mkdtemp()
    words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(200))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def small_model(folder: str) -> SentenceTransformer:
    encoder = models.Transformer(folder)
    return SentenceTransformer(modules=[encoder, models.Pooling(32, "mean")], device="cpu")


def pairs(n: int) -> Dataset:
    """Queries, documents that share two words with them, and hard negatives that share one."""
    g = torch.Generator().manual_seed(1)

    def texts(other_words: int, own_words: int = 2) -> list[str]:
        drawn = torch.randint(0, 200, (n, other_words), generator=g).tolist()
        return [
            " ".join(f"w{word}" for word in [*[i, i + n][:own_words], *row])
            for i, row in enumerate(drawn)
        ]

    return Dataset.from_dict({"anchor": texts(3), "positive": texts(6), "negative": texts(5, 1)})


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"step {state.global_step} loss {logs['loss']:.4f}", flush=True)


if __name__ == "__main__":
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model = small_model(save_small_bert())
    if sys.argv[1:] == ["plain"]:
        loss: nn.Module = losses.MultipleNegativesRankingLoss(model, scale=20.0)
    else:
        loss = ExactRankingLoss(model, scale=20.0, mini_batch_size=8)
    cpu = not torch.cuda.is_available()
    arguments = SentenceTransformerTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=48 // world,  # one batch, seen ten times
        max_steps=10,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and world > 1 else None,
        ddp_find_unused_parameters=False,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=pairs(48), loss=loss, callbacks=[Printed()]
    )
    trainer.train()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads under DDP may abort the interpreter's end
