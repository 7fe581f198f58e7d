"""`contrastive_step` with modules that know nothing of this project; the examples of docs/library.md as they stand."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from clip_train.library import ModuleEngine, Parts, contrastive_step
from clip_train.losses.memory_bank import MemoryBank
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.step import restore_rng, rng_state
from tests import warm
from tests.ranks import RankFailedError, run_ranks

REDUCE_SCATTER, ALL_GATHER = "reduce_scatter_single", "all_gather_single"
if not hasattr(torch_dist, ALL_GATHER):  # before torch 2.13
    REDUCE_SCATTER, ALL_GATHER = "reduce_scatter_tensor", "all_gather_into_tensor"
ROOT = Path(__file__).resolve().parent.parent


class Towers(nn.Module):
    """Texts are a dict, the scale is 0-d, dropout is torch's own."""

    def __init__(self, dropout: float = 0.0, as_dict: bool = False, bias: bool = False):
        super().__init__()
        torch.manual_seed(5)
        self.image = nn.Sequential(
            nn.Linear(10, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6)
        )
        self.text = nn.Sequential(
            nn.Linear(7, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 6)
        )
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.logit_bias = nn.Parameter(torch.tensor(-3.0)) if bias else None
        self.as_dict = as_dict
        self.forwards = 0
        self.double()

    def forward(self, images, texts):
        self.forwards += 1
        image = F.normalize(self.image(images), dim=1)
        text = F.normalize(self.text(texts["a"] + texts["b"]), dim=1)
        out = [image, text, self.logit_scale.exp()] + (
            [self.logit_bias] if self.logit_bias is not None else []
        )
        names = ("image_features", "text_features", "logit_scale", "logit_bias")
        return dict(zip(names, out, strict=False)) if self.as_dict else tuple(out)


def samples(n: int) -> tuple[Tensor, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    images = torch.randn(n, 10, generator=g, dtype=torch.float64)
    return images, {name: torch.randn(n, 7, generator=g, dtype=torch.float64) for name in "ab"}


def part(inputs: tuple[Tensor, dict[str, Tensor]], own: slice) -> tuple[Tensor, dict[str, Tensor]]:
    return inputs[0][own], {name: value[own] for name, value in inputs[1].items()}


def textbook(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    logits = scale * image @ text.T
    if bias is not None:
        signs = 2 * torch.eye(len(logits), dtype=logits.dtype) - 1
        return -F.logsigmoid(signs * (logits + bias)).sum() / len(logits)
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad, q.grad, rtol=1e-11, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "micro_size, kept, forwards", [(12, 1, 1), (4, 1, 5), (4, 2, 4), (4, 3, 3), (5, 9, 3)]
)
@pytest.mark.parametrize("bias, as_dict", [(False, False), (True, True)])
def test_gradients_are_those_of_the_whole_batch(micro_size, kept, forwards, bias, as_dict):
    model, inputs = Towers(as_dict=as_dict, bias=bias), samples(12)
    reference = copy.deepcopy(model)
    reference.as_dict = False
    expected = textbook(*reference(*inputs))
    expected.backward()
    loss = SigmoidLoss() if bias else None
    told = contrastive_step(model, *inputs, micro_size=micro_size, kept_graphs=kept, loss=loss)
    assert told.item() == pytest.approx(expected.item(), rel=1e-12)
    assert model.forwards == forwards
    assert_same_gradients(model, reference)


class Retriever(Towers):
    """Named inputs, one of them a list; names of its own for what it returns."""

    def forward(self, *, queries, documents, weights):
        query, document, scale = super().forward(torch.stack(queries), documents)
        return {"query": query * weights[:, None], "document": document, "logit_scale": scale}


def one_direction(image, text, scale, bias, rows):
    own = torch.arange(0, len(text), len(text) // len(image))
    return F.cross_entropy(scale * image @ text.T, own)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("loss", [None, one_direction])
@pytest.mark.parametrize("micro_size, kept", [(2, 1), (4, 2)])
def test_inputs_have_names_and_documents_outnumber_queries(m, loss, micro_size, kept):
    model, reference = Retriever(), Towers()
    queries, documents = samples(6)[0], samples(6 * m)[1]
    weights = torch.linspace(0.5, 1.5, 6).double()
    query, document, scale = reference(queries, documents)
    logits, own = scale * weights[:, None] * query @ document.T, torch.arange(6)
    expected = F.cross_entropy(logits, m * own)
    if loss is None:
        expected = (expected + F.cross_entropy(logits[:, ::m].T, own)) / 2
    expected.backward()
    batch = {"queries": list(queries), "documents": documents, "weights": weights}
    told = contrastive_step(model, **batch, micro_size=micro_size, kept_graphs=kept, loss=loss)
    assert told.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_dropout_is_the_same_in_both_passes(kept):
    """The oracle: one graph over the same pieces, drawn in the same order."""
    model, inputs = Towers(dropout=0.4), samples(12)
    reference = copy.deepcopy(model)
    torch.manual_seed(3)
    pieces = [reference(*part(inputs, slice(i, i + 4))) for i in (0, 4, 8)]
    after = torch.rand(3)
    textbook(
        torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces]), pieces[-1][2]
    ).backward()
    torch.manual_seed(3)
    contrastive_step(model, *inputs, micro_size=4, kept_graphs=kept)
    assert_same_gradients(model, reference)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("kept", [1, 2])
def test_within_autocast_every_parameter_gets_its_gradient(kept):
    """Autocast caches casts of the weights: the first pass's have no graph, and must not serve the second."""
    model = Towers().float()
    reference = copy.deepcopy(model)
    images, texts = samples(12)
    inputs = images.float(), {name: value.float() for name, value in texts.items()}
    with torch.autocast("cpu", torch.bfloat16):
        expected = textbook(*(x.float() for x in reference(*inputs)))
        contrastive_step(model, *inputs, micro_size=4, kept_graphs=kept)
    expected.backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0.05 * q.grad.abs().max().item())


class Adapter(nn.Module):
    """Calls a model that it holds in another way."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images, texts):
        return self.model(images=images, texts=texts)


class TowersApart(nn.Module):
    """A DDP module for each tower, and a scale that is in neither."""

    def __init__(self, towers: Towers):
        super().__init__()
        self.image, self.text = (
            DistributedDataParallel(towers.image),
            DistributedDataParallel(towers.text),
        )
        self.logit_scale = towers.logit_scale

    forward = Towers.forward
    as_dict, forwards, logit_bias = False, 0, None


def wrapped(kind: str, towers: Towers) -> nn.Module:
    if kind == "apart":
        return TowersApart(towers)
    if kind == "compiled inside":
        return DistributedDataParallel(torch.compile(towers, backend="eager"))
    ddp = DistributedDataParallel(towers)
    if kind == "compiled":
        return torch.compile(ddp, backend="eager")
    return Adapter(ddp) if kind == "adapter" else ddp


def under_ddp(kind: str, micro_size: int, kept: int, dropout: float):
    rank, n = torch_dist.get_rank(), 12 // torch_dist.get_world_size()
    towers = Towers(dropout)
    model = wrapped(kind, towers)
    reduced = []
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, lambda _, bucket: reduce_and_count(reduced, bucket))
    inputs = part(samples(12), slice(rank * n, (rank + 1) * n))
    gradients = []
    for _ in range(2):  # DDP rebuilds its buckets after the first
        model.zero_grad()
        reduced.clear()
        torch.manual_seed(3 + rank)
        loss = contrastive_step(model, *inputs, micro_size=micro_size, kept_graphs=kept)
        gradients.append([p.grad.clone() for p in towers.parameters()])
    crossed = sum(reduced)
    torch.manual_seed(3 + rank)
    contrastive_step(
        model, *inputs, micro_size=micro_size, kept_graphs=kept
    )  # adds to what is there
    gradients.append([p.grad - g for p, g in zip(towers.parameters(), gradients[-1], strict=True)])
    return loss.item(), gradients, crossed


def reduce_and_count(
    reduced: list[int], bucket: torch_dist.GradBucket
) -> torch.futures.Future[Tensor]:
    reduced.append(bucket.buffer().numel())
    work = torch_dist.all_reduce(bucket.buffer() / torch_dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind, micro_size, kept, dropout",
    [("plain", *layout) for layout in ((6, 1, 0.0), (2, 1, 0.0), (2, 3, 0.0), (2, 2, 0.4))]
    + [(kind, 2, 2, 0.0) for kind in ("compiled inside", "compiled", "adapter", "apart")],
)
def test_ddp_gradients_are_the_global_batchs_sent_once(kind, micro_size, kept, dropout):
    reference, inputs = Towers(dropout), samples(12)
    pieces = []
    for rank in range(2):
        torch.manual_seed(3 + rank)
        starts = range(6 * rank, 6 * rank + 6, micro_size)
        pieces += [reference(*part(inputs, slice(i, i + micro_size))) for i in starts]
    expected = textbook(
        torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces]), pieces[-1][2]
    )
    expected.backward()
    for loss, steps, reduced in run_ranks(under_ddp, 2, kind, micro_size, kept, dropout):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert reduced == sum(p.numel() for p in reference.parameters()) - (
            kind == "apart"
        )  # the scale apart
        for gradients in steps:
            for ours, p in zip(gradients, reference.parameters(), strict=True):
                torch.testing.assert_close(ours, p.grad, rtol=1e-11, atol=1e-14)


def under_fsdp(kind: str, stage: int, micro_size: int, kept: int):
    """Losses of two steps, their gradients added up, and each one's collectives and their bytes."""
    W, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    towers, mesh = Towers(0.4), None
    if kind == "copies":
        mesh = init_device_mesh("cpu", (2, W // 2), mesh_dim_names=("copies", "shards"))
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=stage == 3)
    for tower in (towers.image, towers.text):
        if kind != "apart":
            shard(tower[0])
        shard(tower)
    model: nn.Module = Adapter(towers)
    if kind != "apart":  # the scale has no dimension to shard
        model = shard(towers, ignored_params={towers.logit_scale})
    calls: Counter[str] = Counter()
    for name in (REDUCE_SCATTER, ALL_GATHER, "all_reduce"):
        setattr(torch_dist, name, counted(calls, name, getattr(torch_dist, name)))
    inputs = part(samples(12), slice(rank * 12 // W, (rank + 1) * 12 // W))
    with torch.no_grad():
        model(*inputs)  # leaves units whole at stage 2
    losses, counts = [], []
    for _ in range(2):
        calls.clear()
        torch.manual_seed(3 + rank)
        losses += [contrastive_step(model, *inputs, micro_size=micro_size, kept_graphs=kept).item()]
        counts.append(dict(calls))
    whole_gradients = [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for p in towers.parameters()
    ]
    return losses, whole_gradients, counts


def counted(calls: Counter[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        calls[f"{name}, bytes"] += max(x.nbytes for x in tensors)
        return original(*args, **kwargs)

    return call


@pytest.mark.distributed
@pytest.mark.parametrize(
    "world_size, kind, stage, micro_size, kept",
    [
        (2, "blocks", 2, 2, 2),
        (2, "apart", 3, 2, 3),
        (3, "blocks", 3, 2, 1),
        (3, "apart", 2, 1, 2),
        (2, "blocks", 3, 6, 1),
        (4, "copies", 2, 1, 2),
    ],
)
def test_fsdp_gradients_are_the_global_batchs_reduced_once(
    world_size, kind, stage, micro_size, kept
):
    reference, inputs, n = Towers(0.4), samples(12), 12 // world_size
    pieces = []
    for rank in range(world_size):
        torch.manual_seed(3 + rank)
        starts = range(n * rank, n * rank + n, micro_size)
        pieces += [reference(*part(inputs, slice(i, i + micro_size))) for i in starts]
    expected = textbook(
        torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces]), pieces[-1][2]
    )
    expected.backward()
    units = 2 if kind == "apart" else 4
    # of the loss's sums, of the scale that nothing shards, and between copies
    all_reduces = 2 + units * (kind == "copies")
    # rows are padded to a multiple of the ranks that share them
    shards = world_size // 2 if kind == "copies" else world_size
    sharded = [p for p in reference.parameters() if p.ndim]
    whole = sum(8 * p.numel() // len(p) * (-(-len(p) // shards) * shards) for p in sharded)
    # row and column sums, the scale, and between copies each rank's shard
    summed = 2 * 12 * 8 + 8 + (whole // shards if kind == "copies" else 0)
    for losses, gradients, counts in run_ranks(
        under_fsdp, world_size, kind, stage, micro_size, kept
    ):
        assert losses == pytest.approx([expected.item()] * 2, rel=1e-12)
        for calls in counts:
            assert (calls[REDUCE_SCATTER], calls["all_reduce"]) == (units, all_reduces)
            assert calls[f"{REDUCE_SCATTER}, bytes"] == whole
            assert calls["all_reduce, bytes"] == summed
            # of parameters once, and the features
            assert stage == 3 or calls[ALL_GATHER] == units + 1
            assert stage == 3 or calls[f"{ALL_GATHER}, bytes"] == whole + 12 * 2 * 6 * 8
        for ours, p in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, 2 * p.grad, rtol=1e-11, atol=1e-14)


def sharded_otherwise(older: bool):
    if older:
        model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    else:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        model = fully_shard(nn.Linear(2, 2), mesh=mesh["b"])
    contrastive_step(Adapter(model), *samples(6), micro_size=2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "older, told", [(False, "over [1] of 2 ranks"), (True, "model holds FullyShardedDataParallel")]
)
def test_other_sharding_is_refused(older, told):
    with pytest.raises(RankFailedError) as e:
        run_ranks(sharded_otherwise, 2, older)
    for name, message in e.value.errors.values():
        assert name == "ValueError" and told in message


def ddp_in_a_function(compiled: bool):
    ddp = DistributedDataParallel(Towers())
    inside = torch.compile(ddp, backend="eager") if compiled else ddp
    contrastive_step(
        lambda images, texts: inside(images=images, texts=texts), *samples(6), micro_size=2
    )


@pytest.mark.distributed
@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_around_ddp_is_refused(compiled):
    with pytest.raises(RankFailedError) as e:
        run_ranks(ddp_in_a_function, 2, compiled)
    for name, message in e.value.errors.values():
        assert name == "ValueError" and "give an nn.Module that holds it" in message


def test_a_function_replays_randomness_on_its_inputs_device():
    def function(i, t):
        return i, t

    images, texts = (torch.empty(4, 2, device="meta") for _ in range(2))
    for pair in (
        (images, texts),
        ({"a": images}, texts),
        (list(images), list(texts)),
        (["a"] * 4, {"b": texts}),
    ):
        assert ModuleEngine(function, Parts.of(function), pair, 2).device.type == "meta"
    assert ModuleEngine(function, Parts.of(function), ["abcd"], 2).device.type == "cpu"
    towers = Towers()
    assert ModuleEngine(towers, Parts.of(towers), (images, texts), 2).device.type == "cpu"


@pytest.mark.parametrize("micro_size, kept", [(2, 1), (6, 1), (4, 2)])
def test_a_gradient_scaler_scales_the_gradients_and_not_the_loss(micro_size, kept):
    plain, scaled = Towers(), Towers()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = [
        contrastive_step(plain, *samples(6), micro_size=micro_size, kept_graphs=kept),
        contrastive_step(
            scaled, *samples(6), micro_size=micro_size, kept_graphs=kept, scaler=scaler
        ),
    ]
    assert losses[0] == losses[1]
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad * 1024, rtol=1e-12, atol=0)
    scaler.step(
        torch.optim.SGD(scaled.parameters(), lr=0.1)
    )  # finds nothing infinite, and divides by the scale
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-14)


class OtherDevice:
    """A device type whose module has a generator of its own, as torch.xpu and torch.mps have."""

    def __init__(self):
        self.state = 1

    def get_rng_state(self, *device):
        self.asked = device
        return torch.tensor([self.state])

    def set_rng_state(self, state, *device):
        self.state = int(state)


@pytest.mark.parametrize("kind, asked", [("xpu", (torch.device("xpu", 1),)), ("mps", ())])
def test_the_generator_of_any_device_is_replayed(monkeypatch, kind, asked):
    module = OtherDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device(kind, 1 if kind == "xpu" else 0)
    before = rng_state(device)
    module.state = 2
    restore_rng(before, device)
    assert (module.state, module.asked) == (1, asked)


def test_a_device_whose_generator_cannot_be_read_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    with pytest.raises(ValueError, match=r"torch\.xpu has no get_rng_state"):
        rng_state(torch.device("xpu", 0))


class EngineOfItsOwn(Towers):
    def set_gradient_accumulation_boundary(self, is_boundary):
        """Engines that divide and reduce gradients in their own backward have it."""


class ZeroEngine(EngineOfItsOwn):
    dp_world_size = 1

    def coalesce_grad_reduction(self):
        """They have this where a step's backwards can share one reduction."""

    def managed_gradient_accumulation(self):
        return False


def test_mistakes_are_explained():
    images, texts = samples(6)
    with pytest.raises(ValueError, match=r"inputs have \{0: 5, 1: 6\} samples"):
        contrastive_step(Towers(), images[:5], texts, micro_size=2)
    with pytest.raises(ValueError, match=r"\{0: 3, 1: 6\} samples, and loss is SigmoidLoss"):
        contrastive_step(Towers(), images[:3], texts, micro_size=2, loss=SigmoidLoss())
    for wrong in ("text", None, torch.tensor(1), 3):
        with pytest.raises(ValueError, match=r"input modality is a .* without samples"):
            contrastive_step(Towers(), images, texts, modality=wrong, micro_size=2)
    with pytest.raises(ValueError, match="input 1: all values need the same first dimension"):
        contrastive_step(Towers(), images, texts | {"b": texts["b"][:3]}, micro_size=2)
    with pytest.raises(ValueError, match=r"micro_size \(0\) must be at least 1"):
        contrastive_step(Towers(), images, texts, micro_size=0)
    with pytest.raises(ValueError, match="model holds EngineOfItsOwn, which reduces"):
        contrastive_step(Adapter(EngineOfItsOwn()), images, texts, micro_size=2)
    for engine in (EngineOfItsOwn(), ZeroEngine()):
        with pytest.raises(
            ValueError, match=r"model is \w*Engine\w*, which cannot reduce gradients once"
        ):
            contrastive_step(engine, images, texts, micro_size=2)
    with pytest.raises(ValueError, match="scaler: ZeroEngine scales the loss itself"):
        scaler = torch.amp.GradScaler("cpu")
        contrastive_step(ZeroEngine(), images, texts, micro_size=2, scaler=scaler)
    with pytest.raises(ValueError, match="the model must return"):
        contrastive_step(lambda i, t: (i, t["a"]), images, texts, micro_size=2)
    with pytest.raises(ValueError, match="the model must return"):
        contrastive_step(lambda i: {"a": i, "logit_scale": i.sum()}, images, micro_size=2)
    for loss, name in ((MemoryBank(4), "MemoryBank"), ("info_nce", "str")):
        with pytest.raises(ValueError, match=rf"loss must be InfoNCE, .* not {name}"):
            contrastive_step(Towers(), images, texts, micro_size=2, loss=loss)


def example(name: str, folder: Path) -> Path:
    """A program of docs/library.md, as it stands there."""
    document = (ROOT / "docs" / "library.md").read_text()
    [code] = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", document, re.DOTALL)
    (folder / name).write_text(code)
    return folder / name


def printed_by(program: Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(program), run_name="__main__")
    return out.getvalue()


def assert_it_learns(printed: str) -> None:
    losses = [
        float(line.rsplit(" ", 1)[1]) for line in printed.splitlines() if line.startswith("step ")
    ]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]


def test_the_documents_first_example_runs_and_learns(tmp_path):
    assert_it_learns(warm.call(printed_by, example("plain.py", tmp_path)))


def test_the_documents_programs_that_go_on_from_the_first(tmp_path):
    first, check, memory = (
        example(f"{name}.py", tmp_path) for name in ("plain", "check", "memory")
    )
    program = tmp_path / "together.py"
    # `check.py` makes the inputs float64
    program.write_text("".join(file.read_text() for file in (first, memory, check)))
    printed = warm.call(printed_by, program)
    errors = [
        line for line in printed.splitlines() if line.startswith(("image.", "text.", "logit"))
    ]
    assert len(errors) == 8
    assert all(float(line.rsplit(" ", 1)[1]) < 1e-12 for line in errors), errors
    assert "fits: micro_size=96, kept_graphs=1" in printed


@pytest.mark.distributed
def test_the_documents_example_under_torchrun_runs_and_learns(tmp_path):
    program = example("ddp.py", tmp_path)
    # DDP keeps gloo's threads past destroy_process_group, and at times the interpreter's end aborts in them.
    run = f"runpy.run_path({str(program)!r}, run_name='__main__')"
    (tmp_path / "leave.py").write_text(
        f"import os, runpy, sys\n{run}\nsys.stdout.flush()\nos._exit(0)\n"
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    line = [*torchrun, str(tmp_path / "leave.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        line,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    assert_it_learns(out.stdout)
