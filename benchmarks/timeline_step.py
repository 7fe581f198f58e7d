"""One step of `benchmarks/timeline.py`, recorded: `timeline_step.py host|device MODEL SAMPLES [compile]`.

Both ways print the same sequence of parts, as JSON: a part begins where the step calls the engine or the loss, or
reads from the device. FSDP at stage 1 in bf16, rank 0 of 8 under torch's fake process group; the third step counts.

host: seconds of this process in each part, the least of several steps. The model has all its blocks and tensors, but
small ones, on the CPU: what is left is Python, autograd and the dispatch of operators.
device: the kernels of each part on the pretended GPU at full size, each with the seconds of the roofline.

The project is the one in PYTHONPATH, which may be an earlier commit.
"""

# ruff: noqa: E402  the pretended GPU comes before torch

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

WAY, MODEL, SAMPLES = sys.argv[1], sys.argv[2], int(sys.argv[3])
COMPILED = "compile" in sys.argv[4:]
if WAY == "device":
    from tests.pretended import gpu  # isort: skip

import torch
import torch.distributed as td
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from clip_train.engines.config import EngineConfig
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture, load_architecture
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch
from tests.toy import columns_of

WORLD_SIZE = 8
ROUNDS = 12  # steps on the host, after the warm-up
# An H100's peaks, and the share of each that kernels reach.
BYTES = 3.35e12 * 0.85  # a second
FLOPS = {torch.bfloat16: 989e12 * 0.70, torch.float32: 67e12 * 0.80}
ATTENTION = 989e12 * 0.35  # flash attention at 64 to 80 features a head
LEAST = 2e-6  # seconds of a kernel
NO_KERNELS = """
    view _unsafe_view t transpose permute select slice unsqueeze squeeze expand split split_with_sizes detach alias
    as_strided unbind diagonal empty empty_like new_empty empty_strided _reshape_alias lift_fresh new_empty_strided
    record_stream resize_ unfold set_
"""
FREE = frozenset(NO_KERNELS.split())
GATHERS = ("embedding", "index", "gather")  # read as much as they write


def small(architecture: Architecture) -> Architecture:
    """As many blocks, of 32 features and few tokens."""
    vision = {"width": 32, "head_width": 16, "image_size": 32, "patch_size": 16}
    text = {"width": 32, "heads": 2, "context_length": 8, "vocab_size": 64}
    return architecture.model_copy(
        update={
            "embed_dim": 32,
            "vision_cfg": architecture.vision_cfg.model_copy(update=vision),
            "text_cfg": architecture.text_cfg.model_copy(update=text),
        }
    )


class Parts:
    """The parts of a step, one after another: name -> what `measure` returns at its end."""

    def __init__(self, measure: Callable[[], Any]) -> None:
        self.measure, self.names, self.values = measure, ["start"], []
        self.inside = False

    def begin(self, name: str) -> None:
        self.values.append(self.measure())
        self.names.append(name)

    def around(self, owner: Any, method: str, name: str) -> None:
        """A call of `owner.method` is a part of its own."""
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside and name == "read":  # a mode calls it again
                return original(*args, **kwargs)
            self.inside = name == "read"
            self.begin(name)
            out = original(*args, **kwargs)
            self.begin(f"after {name}")
            self.inside = False
            return out

        setattr(owner, method, call)

    def end(self) -> list[tuple[str, Any]]:
        self.values.append(self.measure())
        taken = list(zip(self.names, self.values, strict=True))
        self.names, self.values = ["start"], []
        return taken


class Roofline(TorchDispatchMode):
    """Records kernels as (seconds of arithmetic, bytes read, bytes written, a pointwise one, launches)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[dict[str, Any]] = []
        self.held: list[Any] = []  # storages, so that no other gets their identity

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.__name__.split(".")[0]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_cuda]
        writes = [
            arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments
        ]
        given = [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])]
        changed = [x for arg, w in zip(given, writes, strict=False) if w for x in tensors(arg)]
        if name in FREE or not (made or changed) or "c10d" in func.namespace:
            return out
        read = [x for arg in given for x in tensors(arg)]
        if name in ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"):
            read = [x for arg, w in zip(given, writes, strict=False) if not w for x in tensors(arg)]
        written = [*changed, *(x for x in made if not any(x is y for y in changed))]
        if name in GATHERS:
            read = made
        count = flop_registry.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        rate = FLOPS.get(written[0].dtype if written else torch.float32, FLOPS[torch.float32])
        if "attention" in name:
            rate = ATTENTION
        self.held += [x.untyped_storage() for x in (*read, *written)]
        self.kernels.append(
            {
                "name": name,
                "compute": flops / rate,
                "read": [(id_of(x), size(x)) for x in read],
                "written": [(id_of(x), size(x)) for x in written],
                "launches": max(1, -(-len(changed) // 100)) if "foreach" in name else 1,
            }
        )
        return out

    def take(self) -> list[dict[str, Any]]:
        taken, self.kernels = self.kernels, []
        return taken


def tensors(x: Any) -> Iterator[Tensor]:
    return (y for y in tree_leaves(x) if isinstance(y, Tensor) and y.is_cuda)


def id_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def size(x: Tensor) -> int:
    """Bytes; what is expanded counts once."""
    elements = 1
    for n, stride in zip(x.shape, x.stride(), strict=True):
        elements *= n if stride else 1
    return elements * x.element_size()


def seconds(parts: list[tuple[str, list[dict[str, Any]]]]) -> list[tuple[str, list[list[float]]]]:
    """Parts with kernels as (seconds, launches); compiled: between two products one kernel, of what comes from outside
    and of what is read later."""
    flat = [k for _, kernels in parts for k in kernels]
    last_read: dict[int, int] = {}
    for i, kernel in enumerate(flat):
        kernel["place"] = i
        for storage, _ in kernel["read"]:
            last_read[storage] = i
    out = []
    for name, kernels in parts:
        runs: list[list[dict[str, Any]]] = []
        for kernel in kernels:
            fuses = COMPILED and name in ("forward", "backward") and not kernel["compute"]
            if fuses and runs and not runs[-1][-1]["compute"]:
                runs[-1].append(kernel)
            else:
                runs.append([kernel])
        done = []
        for run in runs:
            compute = sum(k["compute"] for k in run)
            if len(run) == 1:
                moved = sum(n for k in run for _, n in (*k["read"], *k["written"]))
            else:
                written = {s: n for k in run for s, n in k["written"]}
                read = {s: n for k in run for s, n in k["read"] if s not in written}
                later = sum(n for s, n in written.items() if last_read.get(s, 0) > run[-1]["place"])
                moved = sum(read.values()) + later
            launches = run[0]["launches"]
            done.append([max(compute, moved / BYTES, LEAST * launches), launches])
        out.append((name, done))
    return out


def main() -> None:
    torch.set_num_threads(1)
    td.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    architecture = load_architecture(MODEL)
    if WAY == "host":
        architecture = small(architecture)
        out = on_host(architecture)
    else:
        out = on_device(architecture)
    print(json.dumps(out))


def build(architecture: Architecture, device: torch.device) -> Any:
    return EngineConfig(
        kind="fsdp", zero_stage=1, precision="bf16", compile=COMPILED and WAY == "host"
    ).build(
        lambda: CLIP(architecture),
        optimizer,
        device=device,
        grad_clip_norm=1.0,
        micro_size=SAMPLES,
    )


def optimizer(named: Any) -> torch.optim.Optimizer:
    """The fused one, which a GPU has."""
    with mock.patch("torch.cuda.is_available", return_value=True):
        return build_optimizer(OptimConfig(), named)


def mark(engine: Any, parts: Parts) -> InfoNCE:
    """The loss, and the engine's calls as parts."""
    objective = InfoNCE()
    # sums that lack the other ranks' parts would look unsafe, and the step would be repeated
    original = objective.__call__

    class Loss(InfoNCE):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            parts.begin("loss")
            output = original(*args, **kwargs)
            parts.begin("after loss")
            if WAY == "host" and output.unsafe is not None:
                output.unsafe = torch.zeros_like(output.unsafe)
            return output

    for method in ("forward", "backward", "reduce", "step"):
        if hasattr(engine, method):
            parts.around(engine, method, method)
    parts.around(Tensor, "cpu", "read")
    return Loss()


def batch_of(architecture: Architecture, n: int) -> Batch:
    side, length = architecture.vision_cfg.image_size, architecture.text_cfg.context_length
    columns = columns_of(
        torch.zeros(n, 3, side, side, dtype=torch.uint8),
        torch.ones(n, length, dtype=torch.int64),
        torch.arange(n),
        [str(i) for i in range(n)],
        text_lengths=[length] * n,
    )
    return Batch(columns)


def on_host(architecture: Architecture) -> Any:
    fill_gathers()
    torch.manual_seed(0)
    engine = build(architecture, torch.device("cpu"))
    engine.load_fragments(WholeState(CLIP(architecture).state_dict()), {})
    batch, clock = batch_of(architecture, 4), [time.thread_time()]

    def since() -> float:
        now = time.thread_time()
        taken, clock[0] = now - clock[0], now
        return taken

    parts = Parts(since)
    objective = mark(engine, parts)
    steps = []
    for _ in range(ROUNDS + 3):
        since()
        train_step(engine, batch, objective, micro_size=4, kept_graphs=1, lr=0.0)
        steps.append(parts.end())
    steps = steps[3:]
    assert all([n for n, _ in s] == [n for n, _ in steps[0]] for s in steps)
    return [(same[0][0], min(value for _, value in same)) for same in zip(*steps, strict=True)]


def fill_gathers() -> None:
    """No other rank exists: its parts are this rank's, so that all numbers are finite."""
    for name in ("all_gather_into_tensor", "all_gather_single"):
        if hasattr(td, name):
            original = getattr(td, name)

            def call(
                output: Tensor, part: Tensor, *args: Any, _original: Any = original, **kwargs: Any
            ) -> Any:
                done = _original(output, part, *args, **kwargs)
                output.view(WORLD_SIZE, -1).copy_(part.reshape(1, -1).expand(WORLD_SIZE, -1))
                return done

            setattr(td, name, call)
            setattr(td.distributed_c10d, name, call)


def on_device(architecture: Architecture) -> Any:
    from tests.pretended import trace

    trace.prepare_for("fsdp")
    recorded = Roofline()
    with gpu.pretended_gpu():
        engine = build(architecture, trace.GPU)
        parts = Parts(recorded.take)
        objective = mark(engine, parts)
        for _ in range(2):
            batch = batch_of(architecture, SAMPLES).to(trace.GPU)
            with recorded:
                train_step(engine, batch, objective, micro_size=SAMPLES, kept_graphs=1, lr=0.0)
            taken = parts.end()
    return seconds(taken)


if __name__ == "__main__":
    main()
