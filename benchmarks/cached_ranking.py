"""`contrastive_step` beside sentence-transformers' CachedMultipleNegativesRankingLoss, on small BERTs.

    python3 -m venv .venv-st
    .venv-st/bin/pip install torch==2.13.0 sentence-transformers==6.2.0 "pydantic>=2.7" rich pytest
    OMP_NUM_THREADS=1 .venv-st/bin/python benchmarks/cached_ranking.py [--their-test test_cmnrl.py]

Models have random weights, from configurations: nothing is fetched. Both see the same token ids, without dropout.
Each query has its document and 0, 1 or 4 hard negatives. The losses are theirs: queries against documents alone
(their default), and both directions, which is InfoNCE here.

- equal: loss and gradients in float64, and how many of the gradients' elements differ by more than 1e-6.
- seconds: of the CPU, in turn, the median of the rounds, and the memory that a step adds at its peak.
  A chunk is the number of texts that go through the encoder at once, the same for both.
- loss memory: of the loss alone, over features that are there already.
- their test: their own file for that loss, from their repository, with this project's step in its place.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import ROOT, finish, parser
from torch import Tensor, nn

SCALE, LENGTH, WORDS = 20.0, 24, 500
TARGETS = {
    "equal": "loss and gradients within 1e-6 of theirs, in float64",
    "seconds": "at each chunk size no more than theirs",
    "loss memory": "four times the queries need at most 5 times the memory, not 16",
    "their test": "every test of the file passes",
}
THEIR_DIRECTIONS = {
    "one direction": {},
    "both": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
}


def one_direction(
    query: Tensor, document: Tensor, scale: Tensor, bias: None, rows: slice
) -> Tensor:
    """Each query against all documents. Row i's positive is document i m."""
    m = len(document) // len(query)
    own = torch.arange(rows.start, rows.stop, device=query.device) * m
    logits = scale * query[rows] @ document.T
    return F.cross_entropy(logits, own, reduction="sum") / len(query)


one_direction.sums_over_rows = True  # type: ignore[attr-defined]
OUR_LOSSES = {"one direction": one_direction, "both": None}


def their_model(kind: str, width: int, layers: int) -> Any:
    """A SentenceTransformer with random weights, mean pooling, without dropout."""
    from sentence_transformers.sentence_transformer.model import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import AutoConfig, AutoModel, BertTokenizerFast

    sizes: dict[str, Any] = {"vocab_size": WORDS + 31, "max_position_embeddings": 64}
    if kind == "bert":
        sizes |= {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 4 * width, "hidden_dropout_prob": 0.0}
        sizes |= {"attention_probs_dropout_prob": 0.0}
    else:
        sizes |= {"dim": width, "n_layers": layers, "n_heads": 2, "hidden_dim": 4 * width}
        sizes |= {"dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.1}
    folder = tempfile.mkdtemp()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    BertTokenizerFast(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(folder)
    encoder = Transformer(folder)
    return SentenceTransformer(modules=[encoder, Pooling(width, "mean")], device="cpu")


class Retriever(nn.Module):
    """The same encoder for `contrastive_step`: one call for a query and its documents."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, query: dict[str, Tensor], document: dict[str, Tensor]) -> dict[str, Tensor]:
        both = {name: torch.cat([query[name], document[name]]) for name in query}
        features = F.normalize(self.model(both)["sentence_embedding"], dim=-1)
        here, there = features.split([len(query["input_ids"]), len(document["input_ids"])])
        scale = features.new_full((1,), SCALE)
        return {"query": here, "document": there, "logit_scale": scale}


def columns(n: int, negatives: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Token ids as their collator gives them: queries, positives, and each negative's column."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(2 + negatives):
        ids = torch.randint(5, WORDS, (n, LENGTH), generator=g)
        out.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return out


def by_query(their: list[dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The same for `contrastive_step`: the documents of a query one after another."""
    document = {
        name: torch.stack([column[name] for column in their[1:]], dim=1).flatten(0, 1)
        for name in their[0]
    }
    return {"query": their[0], "document": document}


def their_step(model: Any, inputs: list[dict[str, Tensor]], chunk: int, directions: str) -> Tensor:
    from sentence_transformers.sentence_transformer import losses

    loss = losses.CachedMultipleNegativesRankingLoss(
        model, scale=SCALE, mini_batch_size=chunk, **THEIR_DIRECTIONS[directions]
    )
    value = loss(inputs, torch.empty(0))
    value.backward()
    return value.detach()


def our_step(model: Any, inputs: list[dict[str, Tensor]], chunk: int, directions: str) -> Tensor:
    from clip_train.library import contrastive_step

    micro_size = max(chunk // len(inputs), 1)
    return contrastive_step(
        Retriever(model), **by_query(inputs), micro_size=micro_size, loss=OUR_LOSSES[directions]
    )


STEPS: dict[str, Callable[..., Tensor]] = {"ours": our_step, "theirs": their_step}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def equal_rows(missed: list[str]) -> list[dict[str, Any]]:
    rows = []
    for dtype in (torch.float64, torch.float32):
        model = their_model("bert", 64, 2).to(dtype)
        for negatives in (0, 1, 4):
            for directions in THEIR_DIRECTIONS:
                inputs, found = columns(24, negatives), {}
                for name, step in STEPS.items():
                    model.zero_grad()
                    found[name] = (step(model, inputs, 12, directions).item(), gradients(model))
                (ours, own), (theirs, other) = found["ours"], found["theirs"]
                assert own.keys() == other.keys()
                apart = max((own[name] - other[name]).abs().max().item() for name in own)
                row = {"what": "equal", "dtype": str(dtype)[6:], "negatives": negatives}
                row |= {"loss": directions, "loss apart": abs(ours - theirs), "apart": apart}
                rows.append(row)
                if dtype == torch.float64 and max(apart, abs(ours - theirs)) > 1e-6:
                    missed.append(f"equal: {row}")
    return rows


def cpu_rows(missed: list[str], quick: bool) -> list[dict[str, Any]]:
    n, rounds, rows = (48, 3, []) if quick else (192, 5, [])
    model = their_model("bert", 64, 2)
    for negatives in (0, 1, 4):
        inputs = columns(n, negatives)
        for chunk in (12, 48, 192)[: 2 if quick else 3]:
            for directions in THEIR_DIRECTIONS:
                taken: dict[str, list[float]] = {name: [] for name in STEPS}
                for each in range(rounds + 1):
                    for name, step in STEPS.items():
                        model.zero_grad()
                        start = time.process_time()
                        step(model, inputs, chunk, directions)
                        if each:
                            taken[name].append(time.process_time() - start)
                seconds = {name: statistics.median(values) for name, values in taken.items()}
                peaks = {
                    name: peak(partial(step, model, inputs, chunk, directions))
                    for name, step in STEPS.items()
                }
                row = {"what": "seconds", "negatives": negatives, "chunk": chunk}
                row |= {
                    "loss": directions,
                    "ours s": seconds["ours"],
                    "theirs s": seconds["theirs"],
                }
                row |= {"ratio": seconds["ours"] / seconds["theirs"]}
                row |= {f"{name} MiB": value for name, value in peaks.items()}
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
                if seconds["ours"] > seconds["theirs"]:
                    missed.append(f"seconds: {row}")
    return rows


def resident(which: str) -> float:
    """MiB of this process: now, "VmRSS", or at its peak, "VmHWM"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith(f"{which}:")]
    return int(line.split()[1]) / 1024


def peak(run: Callable[[], Any]) -> float:
    """MiB by which memory at its peak within `run` exceeds what was resident before."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def our_loss(image: Tensor, text: Tensor) -> None:
    from clip_train.losses.function import FunctionLoss
    from clip_train.task import named_features

    FunctionLoss(one_direction, {})(named_features(image, text, torch.tensor([SCALE])))


def our_info_nce(image: Tensor, text: Tensor) -> None:
    from clip_train.losses.info_nce import InfoNCE
    from clip_train.task import named_features

    InfoNCE()(named_features(image, text, torch.tensor([SCALE])))


def their_loss(image: Tensor, text: Tensor) -> None:
    from sentence_transformers.sentence_transformer import losses

    loss = losses.CachedMultipleNegativesRankingLoss(nn.Sequential(nn.Identity()), scale=SCALE)
    reps = [[x.clone().requires_grad_()] for x in (image, text)]
    loss.calculate_loss(reps, with_backward=True)


LOSSES = {"ours": our_loss, "ours, InfoNCE": our_info_nce, "theirs": their_loss}


def memory_rows(missed: list[str], quick: bool) -> list[dict[str, Any]]:
    sizes = (2048, 8192) if quick else (4096, 16384)
    rows = []
    for name, loss in LOSSES.items():
        torch.manual_seed(0)
        features = [F.normalize(torch.randn(2, n, 64), dim=-1).unbind() for n in (64, *sizes)]
        _, *used = [peak(partial(loss, *sides)) for sides in features]  # the first one imports
        row = {"what": "loss memory", "whose": name}
        row |= {f"MiB at {n}": value for n, value in zip(sizes, used, strict=True)}
        rows.append(row)
        if name != "theirs" and used[1] > 5 * used[0]:
            missed.append(f"loss memory: {row}")
    return rows


class InTheirPlace(nn.Module):
    """`contrastive_step` behind the interface of their loss: gradients wait for `backward()`."""

    def __init__(self, model: Any, mini_batch_size: int = 32) -> None:
        super().__init__()
        self.model, self.mini_batch_size = model, mini_batch_size

    def forward(self, inputs: list[dict[str, Tensor]], labels: Tensor) -> Tensor:
        before = {p: p.grad for p in self.model.parameters()}
        self.model.zero_grad(set_to_none=True)
        longest = max(column["input_ids"].shape[1] for column in inputs)
        padded = [
            {name: F.pad(x, (0, longest - x.shape[1])) for name, x in column.items()}
            for column in [
                {name: column[name] for name in ("input_ids", "attention_mask")}
                for column in inputs
            ]
        ]
        chunk = self.mini_batch_size * len(inputs)
        value = our_step(self.model, padded, chunk, "one direction")
        added = {p: p.grad for p in before}
        for p, gradient in before.items():
            p.grad = gradient

        def add(scale: Tensor) -> None:
            for p, gradient in added.items():
                if gradient is not None:
                    scaled = gradient * scale.to(gradient)
                    p.grad = scaled if p.grad is None else p.grad + scaled

        out = value.float().requires_grad_()
        out.register_hook(add)
        return out


def their_test(file: str, ours: bool) -> tuple[str, bool]:
    """Their file, run by pytest on a small random model, as it is or with `InTheirPlace`."""
    import pytest
    import sentence_transformers
    from sentence_transformers.sentence_transformer import losses

    class Patched:
        def __init__(self) -> None:
            self.outcomes: dict[str, str] = {}

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call":
                self.outcomes[report.nodeid.split("::")[-1]] = report.outcome

    if ours:
        losses.CachedMultipleNegativesRankingLoss = InTheirPlace  # type: ignore[misc]
    small = lambda name: their_model("distilbert", 64, 2)  # noqa: E731
    sentence_transformers.SentenceTransformer = small  # type: ignore[misc, assignment]
    sys.modules.pop(Path(file).stem, None)  # bound to the other loss
    plugin = Patched()
    status = pytest.main(["-q", "-o", "addopts=", "-p", "no:cacheprovider", file], [plugin])
    passed = sum(outcome == "passed" for outcome in plugin.outcomes.values())
    return f"{passed} of {len(plugin.outcomes)}", status == 0


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--their-test", metavar="FILE", help="test_cmnrl.py of their repository")
    args = p.parse_args()
    torch.set_num_threads(1)
    missed: list[str] = []
    blocks = [equal_rows(missed), memory_rows(missed, args.quick), cpu_rows(missed, args.quick)]
    if args.their_test:
        found = {
            whose: their_test(args.their_test, whose == "ours") for whose in ("theirs", "ours")
        }
        blocks.append(
            [
                {"what": "their test", "whose": whose, "passed": passed}
                for whose, (passed, _) in found.items()
            ]
        )
        if not found["ours"][1]:
            missed.append(f"their test: {found['ours'][0]}")
    status = 0
    for i, rows in enumerate(blocks):
        last = i + 1 == len(blocks)
        status |= finish(
            "cached_ranking", rows, TARGETS if last else {}, missed if last else [], args
        )
    return status


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
