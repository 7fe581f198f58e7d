"""What a step costs: this project's beside OpenCLIP's own `train_one_epoch`, in CPU seconds per sample.

Same model (the weights are copied over and the first loss compared), same global batch, AdamW, gradient clip,
fp32, one thread each. Every trainer is a process of its own that takes one step when told to; they are told
in turn, so that whatever else the machine does hits all alike. Peak memory is of a fresh process per row.

Texts fill the whole context, so that nothing can be saved on padding (`--texts full`, by which the targets are judged),
or are as long as captions (`--texts captions`): log-normal around 20 of 77 tokens, sigma 0.45, which is scaled to this
model's context and clipped to it. Our step cuts a micro-batch at its longest text, as on the loader's batches.

OpenCLIP runs in the environment of `scripts/setup_peers.sh`: `--peer-python .venv-peers/bin/python`.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TARGETS = {
    "own full batch": "k up to 8: at most 1.34x of our k = 1 at m = 1 (4/3 - m/3k is the arithmetic: 1.29 at 8), "
    "1.05x at m = k; both engines",
    "OpenCLIP at k = 8": "at least 1.15x its speed at m = 1, 1.4x at m = k; both engines",
}
AT_M1, AT_MK, FASTER_AT_M1, FASTER_AT_MK = 1.34, 1.05, 1.15, 1.4
SEED, LR, CLIP_NORM = 7, 1e-4, 1.0
# glibc would give large tensors back to the kernel and fault them in again, most at k = 1: as on a GPU, memory is
# kept while time is measured. The processes whose memory is measured run without this.
KEEP_HEAP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
TEXTS = "STEP_BENCHMARK_TEXTS"  # tells the workers
MODEL = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 64, "layers": 6, "width": 256, "head_width": 64, "patch_size": 16},
    # 4096 words and not 49408: the optimizer on an embedding would outweigh so small a model's towers
    "text_cfg": {"context_length": 32, "vocab_size": 4096, "width": 192, "heads": 4, "layers": 4},
}


# -- in a worker: one trainer, one step at a time ------------------------------------------------------------


def global_batch(N: int):
    from clip_train.task import Batch, text_lengths
    from tests.toy import columns_of

    g = torch.Generator().manual_seed(SEED)
    text = MODEL["text_cfg"]
    texts = torch.randint(1, text["vocab_size"] - 1, (N, text["context_length"]), generator=g)
    lengths = torch.full((N,), text["context_length"])
    if os.environ.get(TEXTS) == "captions":
        drawn = 20 * torch.exp(0.45 * torch.randn(N, generator=g)) * text["context_length"] / 77
        lengths = drawn.round().long().clamp(3, text["context_length"])
    place = torch.arange(text["context_length"])
    texts[place == lengths[:, None] - 1] = (
        text["vocab_size"] - 1
    )  # the highest id is the end, in both trainers
    texts[place >= lengths[:, None]] = 0
    side = MODEL["vision_cfg"]["image_size"]
    images = torch.randint(0, 256, (N, 3, side, side), generator=g, dtype=torch.uint8)
    return Batch(columns_of(images, texts, torch.arange(N), text_lengths=text_lengths(texts)))


def our_model():
    from clip_train.models.clip import CLIP
    from clip_train.models.config import parse_architecture

    torch.manual_seed(SEED)
    return CLIP(parse_architecture(MODEL, "benchmarks/step.py"))


class Ours:
    """`clip_train.step.train_step` on the plain engine, or on DeepSpeed's at ZeRO 1."""

    def __init__(self, engine: str):
        from clip_train.engines.base import PlainEngine
        from clip_train.losses.info_nce import InfoNCE
        from clip_train.optim.config import OptimConfig
        from clip_train.optim.optimizer import build_optimizer

        def optimizer(named):
            return build_optimizer(OptimConfig(lr=LR), named)

        self.loss = InfoNCE()
        if engine == "plain":
            model = our_model()
            self.engine = PlainEngine(model, optimizer(model.named_parameters()), CLIP_NORM)
        else:
            self.engine = self._deepspeed(optimizer)

    @staticmethod
    def _deepspeed(optimizer):
        import torch.distributed as torch_dist

        from clip_train.engines.config import EngineConfig

        torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
        config, cpu = EngineConfig(zero_stage=1), torch.device("cpu")
        return config.build(
            our_model, optimizer, device=cpu, grad_clip_norm=CLIP_NORM, micro_size=8
        )

    def prepare(self, N: int, k: int) -> Any:
        return global_batch(N)

    def step(self, batch: Any, k: int, m: int) -> float:
        from clip_train.step import train_step

        micro = math.ceil(len(batch) / k)
        return train_step(
            self.engine, batch, self.loss, micro_size=micro, kept_graphs=m, lr=LR
        ).loss


class OpenCLIP:
    """open_clip_train's `train_one_epoch` on an epoch of one step, fed from memory."""

    def __init__(self):
        import tests.peers.torchvision_shim  # noqa: F401  before open_clip
        import open_clip  # isort: skip
        from open_clip_train.train import train_one_epoch

        self.train_one_epoch = train_one_epoch
        self.mean, self.std = (
            torch.tensor(v).view(3, 1, 1)
            for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
        )
        self.model = open_clip.model.CLIP(**MODEL, output_dict=True)
        ours, theirs = our_model().state_dict(), self.model.state_dict()
        self.model.load_state_dict(
            {name: ours[name].reshape(t.shape) for name, t in theirs.items() if name in ours}
        )
        named = list(
            self.model.named_parameters()
        )  # its own grouping: no decay for vectors and scalars
        groups = [
            {"params": [p for name, p in named if p.ndim < 2], "weight_decay": 0.0},
            {"params": [p for name, p in named if p.ndim >= 2], "weight_decay": 0.2},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), eps=1e-6)
        loss = open_clip.ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True)
        self.told = math.nan

        def listening(**features):
            out = loss(**features)
            self.told = out["contrastive_loss"].item()
            return out

        self.loss = listening

    def prepare(self, N: int, k: int) -> Any:
        """Normalised float images, as its loader's workers deliver them; ours normalises within the step."""
        batch = global_batch(N)
        images = (batch.images / 255 - self.mean) / self.std
        return list(zip(images.chunk(k), batch.texts.chunk(k), strict=True))

    def step(self, micro_batches: Any, k: int, m: int) -> float:
        class Loader(list):
            num_batches, num_samples = k, sum(len(images) for images, _ in micro_batches)

        data = {
            "train": SimpleNamespace(set_epoch=lambda epoch: None, dataloader=Loader(micro_batches))
        }
        args = SimpleNamespace(
            device="cpu", precision="fp32", distill=False, accum_freq=k, skip_scheduler=False, horovod=False,
            grad_clip_norm=CLIP_NORM, rank=0, local_rank=0, log_local=False, log_every_n_steps=1, world_size=1,
            batch_size=Loader.num_samples // k, wandb=False,
        )  # fmt: skip
        self.train_one_epoch(
            self.model,
            data,
            self.loss,
            0,
            self.optimizer,
            None,
            lambda step: None,
            None,
            args,
            tb_writer=None,
        )
        return self.told


def peak_bytes() -> int:
    """This process's own high-water mark; ru_maxrss would start at that of the process that spawned it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status: this benchmark needs Linux")


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(kind: str) -> int:
    """Reads `N k m` lines, takes that step, answers with what it cost."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    trainer = OpenCLIP() if kind == "openclip" else Ours(kind)
    print("ready", file=answers)
    batches: dict[tuple[int, int], Any] = {}
    for line in sys.stdin:
        N, k, m = map(int, line.split())
        batch = batches.setdefault((N, k), trainer.prepare(N, k))
        before = rss_bytes()
        start = time.process_time()
        loss = trainer.step(batch, k, m)
        seconds = time.process_time() - start
        print(
            json.dumps({"seconds": seconds, "loss": loss, "memory": peak_bytes() - before}),
            file=answers,
        )
    return 0


# -- in the parent: telling workers in turn ------------------------------------------------------------------


class Worker:
    """A trainer in a process of its own."""

    def __init__(self, kind: str, python: str, threads: int, keep_heap: bool):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
        if keep_heap:
            environment |= KEEP_HEAP
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--worker", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"a worker ended with status {self.process.wait()}; its error is above"
            )
        return line

    def wait_ready(self) -> None:
        assert self._answer() == "ready\n"

    def step(self, N: int, k: int, m: int) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{N} {k} {m}\n")
        self.process.stdin.flush()
        return json.loads(self._answer())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Row:
    trainer: str  # plain, deepspeed, openclip
    k: int
    m: int  # retained graphs


def rows_for(trainers: list[str], ks: list[int]) -> list[Row]:
    """In the order of timing: every trainer at one k before the next k."""
    kept = {
        trainer: (lambda k: [1]) if trainer == "openclip" else (lambda k: sorted({1, k}))
        for trainer in trainers
    }
    return [Row(trainer, k, m) for k in ks for trainer in trainers for m in kept[trainer](k)]


def peak_memory(row: Row, python: str, threads: int, N: int) -> float:
    """Bytes that a step adds to a process which has already taken a tiny one (so that AdamW's state exists)."""
    with Worker(row.trainer, python, threads, keep_heap=False) as worker:
        worker.wait_ready()
        worker.step(2, 1, 1)
        return worker.step(N, row.k, row.m)["memory"]


def compare(seconds: dict[Row, list[float]], a: Row, b: Row) -> float:
    """How much longer `a` takes than `b`: the median over rounds of the ratio within a round."""
    return statistics.median(x / y for x, y in zip(seconds[a], seconds[b], strict=True))


def check(seconds: dict[Row, list[float]]) -> list[str]:
    missed = []
    for row in seconds:
        if row.trainer == "openclip" or not 1 < row.k <= 8:
            continue
        limit, name = (AT_MK, "m = k") if row.m == row.k else (AT_M1, "m = 1")
        ratio = compare(seconds, row, Row(row.trainer, 1, 1))
        if ratio > limit:
            missed.append(
                f"{row.trainer}, k = {row.k}, {name}: {ratio:.3f}x of our full-batch step, not {limit}x"
            )
        theirs = Row("openclip", row.k, 1)
        if row.k == 8 and theirs in seconds:
            least = FASTER_AT_MK if row.m == row.k else FASTER_AT_M1
            faster = compare(seconds, theirs, row)
            if faster < least:
                missed.append(
                    f"{row.trainer}, k = 8, {name}: {faster:.3f}x OpenCLIP's speed, not {least}x"
                )
    return missed


def arithmetic(k: int, faster: float) -> str:
    """What fewer forwards and faster products give by themselves. faster: our products' rate over MKL's."""
    theirs = 2 + 2  # in forwards: each micro-batch twice, and a backward of two
    least, most = (theirs / (2 - m / k + 2) for m in (1, k))
    return (
        f"arithmetic at k = {k} allows {least * faster:.2f}x OpenCLIP's speed with one graph and {most * faster:.2f}x "
        f"with all: fewer forwards give {least:.2f}x and {most:.2f}x, faster products {faster:.2f}x; what is above "
        "comes from work that is not a matrix product"
    )


def main() -> int:
    from common import describe_products, find_peer, finish, parser, products

    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--peer-python", metavar="PYTHON", help="a Python that has open_clip (default: .venv-peers)"
    )
    arguments.add_argument(
        "--threads", type=int, default=1, help="of each trainer (CPU seconds of 1 are all work)"
    )
    arguments.add_argument(
        "--rounds", type=int, default=5, help="steps of each row that are timed (2 with --quick)"
    )
    arguments.add_argument("--no-memory", action="store_true", help="time only")
    arguments.add_argument(
        "--texts", choices=["full", "captions"], default="full", help="how long the texts are"
    )
    args = arguments.parse_args()
    os.environ[TEXTS] = args.texts
    N, ks, rounds = (128, [1, 8], 2) if args.quick else (256, [1, 4, 8, 32], args.rounds)
    peer = find_peer(args.peer_python, "open_clip_train.train")
    python = {"plain": sys.executable, "deepspeed": sys.executable} | (
        {"openclip": peer} if peer else {}
    )
    rows = rows_for(list(python), ks)
    missed: list[str] = []

    def added_memory(row: Row) -> float:
        return peak_memory(row, python[row.trainer], args.threads, N) / 2**20

    workers = {
        trainer: Worker(trainer, path, args.threads, keep_heap=True)
        for trainer, path in python.items()
    }
    seconds: dict[Row, list[float]] = {row: [] for row in rows}
    try:
        losses = {}
        for trainer, worker in workers.items():
            worker.wait_ready()
            losses[trainer] = worker.step(N, 1, 1)["loss"]  # also the warm-up
        if max(losses.values()) - min(losses.values()) > 1e-4 * min(losses.values()):
            missed.append(f"the trainers do not have the same model: first losses {losses}")
        for _ in range(rounds):
            for row in rows:
                seconds[row].append(workers[row.trainer].step(N, row.k, row.m)["seconds"])
    finally:
        for worker in workers.values():
            worker.__exit__()

    with ThreadPoolExecutor(2) as pool:  # two processes at once: memory is not time
        memory = (
            {}
            if args.quick or args.no_memory
            else dict(zip(rows, pool.map(added_memory, rows), strict=True))
        )
    table = []
    for row in sorted(rows, key=lambda r: list(python).index(r.trainer)):
        ours = row.trainer != "openclip"
        theirs = Row("openclip", row.k, 1)
        cell: dict[str, Any] = {
            "trainer": {"plain": "ours, plain torch", "deepspeed": "ours, ZeRO 1"}.get(
                row.trainer, "OpenCLIP"
            ),
            "k": row.k,
            "retained graphs": row.m if ours else "-",
            "forwards": 2 - row.m / row.k if ours else (2.0 if row.k > 1 else 1.0),
            "CPU ms per sample": 1000 * statistics.median(seconds[row]) / N,
            "x own k=1": compare(seconds, row, Row(row.trainer, 1, 1)),
            "x OpenCLIP's speed": compare(seconds, theirs, row) if ours and peer else "",
            "MiB the step adds": memory.get(row, ""),
        }
        table.append(cell)
    if peer is None:
        table.append(
            {
                **dict.fromkeys(table[0], ""),
                "trainer": "OpenCLIP: not installed (scripts/setup_peers.sh)",
            }
        )
    missed += check(seconds)
    rates = products()
    print(describe_products(rates))
    print(arithmetic(8, max(rates.values()) / rates["MKL"]))
    return finish("step", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2]) if sys.argv[1:2] == ["--worker"] else main())
