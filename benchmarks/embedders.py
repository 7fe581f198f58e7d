"""One step of an embedder: `contrastive_step` beside GradCache, sentence-transformers and colpali-engine.

    python3 -m venv .venv-embedders && .venv-embedders/bin/pip install torch==2.13.0
    .venv-embedders/bin/pip install --no-deps torchvision==0.28.0 colpali-engine==0.3.18
    .venv-embedders/bin/pip install transformers==5.24.0 sentence-transformers==5.3.0 peft pillow "pydantic>=2.7" rich
    git clone https://github.com/luyug/GradCache
    PYTHONPATH=GradCache/src .venv-embedders/bin/python benchmarks/embedders.py

A random Qwen2-VL of 3 layers is the encoder of both sides, without dropout. Three cases:

- pages: documents are images of any size, as flattened patches; one vector for each.
- pages, tokens: the same with a vector for each token and MaxSim, where padding is a similarity of 0.
- texts: documents are texts; one vector for each.

`piece` is how many samples go through the encoder at once. `error`: of the encoder's gradient beside autograd over
the whole batch, |g - exact| / |exact|, in float64. Seconds are of the CPU, of one thread, in float32: the median of
rounds that run all ways in turn. MiB are what a step allocates at its peak, by torch's profiler: resident memory
would also count what the C library does not give back.

colpali-engine has no cache of features: its trainer's `compute_loss` sees a piece by itself, and the mean over the
pieces is what gradient accumulation adds up.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import ROOT, finish, parser
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(ROOT))
import tests.peers.torchvision_shim  # noqa: F401  before transformers

SCALE, IMAGE, WORDS = 20.0, 99, 100
TARGETS = {
    "exact": "contrastive_step: error within 1e-9 in each case",
    "seconds": "no more than the exact peers in pieces, in each case",
    "memory": "one side at a time, as the peers: at most 1.05 times the exact peer in pieces that needs least",
}


class Encoder(nn.Module):
    """Rows of tokens, perhaps with images, to normalized features."""

    def __init__(self, width: int, tokens: bool) -> None:
        from transformers import Qwen2VLConfig, Qwen2VLModel

        super().__init__()
        config = Qwen2VLConfig(
            text_config={
                "hidden_size": width,
                "intermediate_size": 3 * width,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": WORDS,
                "bos_token_id": None,
                "eos_token_id": None,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [width // 32, width // 32, width // 16],
                    "rope_theta": 1e4,
                },
            },
            vision_config={
                "depth": 2,
                "embed_dim": width // 2,
                "hidden_size": width,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            image_token_id=IMAGE,
            vision_start_token_id=97,
            vision_end_token_id=98,
            video_token_id=96,
        )
        torch.manual_seed(0)
        self.model = Qwen2VLModel(config)
        self.head = nn.Linear(width, 64)
        self.tokens = tokens

    def forward(self, **inputs: Tensor) -> Tensor:
        """[b, 64], or [b, L, 64] with zeros where tokens are padding"""
        hidden = self.head(self.model(**inputs, use_cache=False).last_hidden_state)
        mask = inputs["attention_mask"][..., None].to(hidden.dtype)
        if self.tokens:
            return F.normalize(hidden, dim=-1) * mask
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def texts(n: int, length: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(length) < length // 2 + torch.arange(n)[:, None] % (length // 2)).long()
    return {
        "input_ids": torch.randint(1, 90, (n, length), generator=g) * mask,
        "attention_mask": mask,
    }


def pages(n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Images of 8 to 24 by 8 to 20 patches, as Qwen's processors return them."""
    g = torch.Generator().manual_seed(2)
    sides = 2 * torch.stack([4 + torch.arange(n) % 9, 4 + torch.arange(n) * 5 % 7], dim=1)
    grids = torch.cat([torch.ones(n, 1, dtype=torch.int64), sides], dim=1)
    patches = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4, generator=g)
    merged = (grids.prod(1) // 4).tolist()
    length = max(merged) + 3
    ids = torch.zeros(n, length, dtype=torch.int64)
    for i, count in enumerate(merged):
        ids[i, : count + 3] = torch.tensor([97, *[IMAGE] * count, 98, 5 + i % 80])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": patches.to(dtype),
        "image_grid_thw": grids,
    }


@dataclass
class Case:
    name: str
    encoder: Encoder
    query: dict[str, Tensor]
    document: dict[str, Tensor]
    piece: int

    @classmethod
    def of(cls, name: str, n: int, width: int, piece: int, dtype: torch.dtype) -> Case:
        encoder = Encoder(width, tokens="tokens" in name).to(dtype)
        document = pages(n, dtype) if "pages" in name else texts(n, 96, seed=3)
        return cls(name, encoder, texts(n, 16, seed=1), document, piece)


def part_of(inputs: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Samples [start, stop), with their patches."""
    if "pixel_values" not in inputs:
        return {name: x[start:stop] for name, x in inputs.items()}
    ends = [0, *inputs["image_grid_thw"].prod(1).cumsum(0).tolist()]
    part = {name: x[start:stop] for name, x in inputs.items() if name != "pixel_values"}
    return {
        **part,
        "pixel_values": inputs["pixel_values"][ends[start] : ends[min(stop, len(ends) - 1)]],
    }


def loss_of(query: Tensor, document: Tensor) -> Tensor:
    if query.ndim == 3:
        scores = torch.einsum("iqd,jtd->ijqt", query, document).amax(-1).sum(-1)
    else:
        scores = query @ document.T
    return F.cross_entropy(SCALE * scores, torch.arange(len(query)))


def plain(case: Case) -> None:
    """The whole batch at once."""
    loss_of(case.encoder(**case.query), case.encoder(**case.document)).backward()


class Retriever(nn.Module):
    """For `contrastive_step`."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, **inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for name, side in inputs.items():
            out[name] = self.encoder(**side)
            if self.encoder.tokens:
                out[f"{name}_mask"] = side["attention_mask"]
        return out


def ours(case: Case, by_tower: bool = False) -> None:
    from clip_train import MaxSim, Ranking, contrastive_step

    loss = Ranking(scale=SCALE)
    if case.encoder.tokens:
        loss = MaxSim(scale=SCALE, padding="zero")
    contrastive_step(
        Retriever(case.encoder),
        query=case.query,
        document=case.document,
        micro_size={"query": case.piece, "document": case.piece} if by_tower else case.piece,
        loss=loss,
        split_by={"pixel_values": "image_grid_thw"} if "pixel_values" in case.document else None,
    )


def grad_cache(case: Case) -> None:
    """Its class, with a function that cuts ragged patches: its own would cut them like samples."""
    from grad_cache import GradCache

    def cut(inputs: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
        n = len(inputs["input_ids"])
        return [part_of(inputs, start, start + size) for start in range(0, n, size)]

    cache = GradCache([case.encoder, case.encoder], case.piece, loss_of, split_input_fn=cut)
    cache(case.query, case.document)


class AsTheirs(nn.Module):
    """For sentence-transformers: features in a dict, and the vector by their name."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.encoder(**features)}


def sentence_transformers(case: Case) -> None:
    from sentence_transformers import losses, util

    loss = losses.CachedMultipleNegativesRankingLoss(
        nn.Sequential(AsTheirs(case.encoder)),
        scale=SCALE,
        similarity_fct=util.dot_score,
        mini_batch_size=case.piece,
    )
    loss([case.query, case.document], torch.empty(0)).backward()


def colpali_trainer(case: Case) -> Any:
    from colpali_engine.loss import BiEncoderLoss, ColbertLoss
    from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer
    from transformers import TrainingArguments

    loss: Any = BiEncoderLoss(temperature=1 / SCALE)
    if case.encoder.tokens:
        loss = ColbertLoss(temperature=1 / SCALE, normalize_scores=False)
    arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[])
    return ContrastiveTrainer(
        loss, True, model=case.encoder, args=arguments, train_dataset=None, eval_dataset=None
    )


def colpali(case: Case, at_once: bool = False) -> None:
    trainer, n = colpali_trainer(case), len(case.query["input_ids"])
    piece = n if at_once else case.piece
    for start in range(0, n, piece):
        query = part_of(case.query, start, start + piece)
        document = part_of(case.document, start, start + piece)
        inputs = {f"query_{name}": x for name, x in query.items()}
        inputs |= {f"doc_{name}": x for name, x in document.items()}
        loss = trainer.compute_loss(case.encoder, inputs)
        (loss * (piece / n)).backward()  # as Trainer does for gradient_accumulation_steps


# name -> the step, and whether it computes in pieces
WAYS: dict[str, tuple[Callable[[Case], None], bool]] = {
    "plain batch": (plain, False),
    "contrastive_step": (ours, True),
    "contrastive_step, one side at a time": (partial(ours, by_tower=True), True),
    "GradCache": (grad_cache, True),
    "sentence-transformers, cached": (sentence_transformers, True),
    "colpali-engine, accumulated": (colpali, True),
    "colpali-engine, at once": (partial(colpali, at_once=True), False),
}


def gradient(case: Case, way: str) -> Tensor:
    case.encoder.zero_grad()
    WAYS[way][0](case)
    return torch.cat([p.grad.flatten() for p in case.encoder.parameters() if p.grad is not None])


def allocated(run: Callable[[], None]) -> float:
    """MiB that torch has allocated at the peak of `run`, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    live = highest = 0
    for change in sorted(changes, key=lambda change: change["Ev Idx"]):
        live += change["Bytes"]
        highest = max(highest, live)
    return highest / 2**20


def rows_of(name: str, n: int, width: int, piece: int, rounds: int) -> list[dict[str, Any]]:
    exact = Case.of(name, n, width, piece, torch.float64)
    wanted = gradient(exact, "plain batch")
    rows = []
    for way, (_, in_pieces) in WAYS.items():
        row: dict[str, Any] = {
            "case": name,
            "way": way,
            "piece": piece if in_pieces else n,
            "error": "",
            "CPU s": "",
            "MiB": "",
            "cannot": "",
        }
        try:
            found = gradient(exact, way)
            row["error"] = ((found - wanted).norm() / wanted.norm()).item()
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            row["cannot"] = f"{type(error).__name__}: {error}".splitlines()[0][:90]
        rows.append(row)
    case = Case.of(name, n, width, piece, torch.float32)
    able = [row for row in rows if not row["cannot"]]
    seconds: dict[str, list[float]] = {row["way"]: [] for row in able}
    for i in range(rounds + 1):
        for row in able:
            start = time.process_time()
            gradient(case, row["way"])
            if i:  # the first one imports
                seconds[row["way"]].append(time.process_time() - start)
    for row in able:
        row["CPU s"] = statistics.median(seconds[row["way"]])
        case.encoder.zero_grad()
        row["MiB"] = allocated(partial(WAYS[row["way"]][0], case))
        print(row, file=sys.stderr, flush=True)
    return rows


def shortcomings(rows: list[dict[str, Any]]) -> list[str]:
    by_way = {row["way"]: row for row in rows}
    peers = [
        row
        for row in rows
        if not row["way"].startswith("contrastive_step")
        and WAYS[row["way"]][1]
        and not row["cannot"]
        and row["error"] < 1e-9
    ]
    missed = []
    own = by_way["contrastive_step"]
    for row in (own, by_way["contrastive_step, one side at a time"]):
        if row["cannot"] or row["error"] > 1e-9:
            missed.append(f"exact: {row}")
    for peer in peers:
        if own["CPU s"] > peer["CPU s"]:
            missed.append(f"seconds: {own}, {peer}")
    least = by_way["contrastive_step, one side at a time"]["MiB"]
    if peers and least > 1.05 * min(peer["MiB"] for peer in peers):
        missed.append(f"memory: {least}, {peers}")
    return missed


def main() -> int:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    n, width, piece, rounds = (16, 32, 4, 1) if args.quick else (64, 128, 8, 3)
    rows, missed = [], []
    for name in ("pages", "pages, tokens", "texts"):
        found = rows_of(name, n, width, piece, rounds)
        rows += found
        missed += shortcomings(found)
    if args.quick:
        missed = [line for line in missed if line.startswith("exact")]
    return finish("embedders", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
