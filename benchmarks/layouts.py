"""Checkpoints from any layout into any other: ranks x engine x stage, through the real files.

A small CLIP trains three AdamW steps in fp32 on each layout, saves, and goes on for five without a break. Every
checkpoint is then resumed on every layout, and goes on for five. What is compared is the resumed run with the one that
was never interrupted, both as torch's optimizer (ZeRO 0, plain), DeepSpeed's accessors (ZeRO 1 to 3) and
torch.distributed.checkpoint.state_dict (FSDP) show them, which the checkpoints are not made with. Equal to the last
bit: every parameter, its copy in the model, both moments, step counts, every parameter's hyper-parameters. Near: the
next five losses, and the weights after them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import finish, parser, small_clip

from clip_train import dist
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.engines.config import EngineConfig, describe_sharding
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch
from tests.ranks import run_ranks
from tests.toy import columns_of


class Layout(NamedTuple):
    world_size: int
    kind: str
    stage: int

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(kind=self.kind, zero_stage=self.stage)

    def __str__(self) -> str:
        return f"{self.world_size} x {describe_sharding(self.engine.model_dump())}"


TARGETS = {
    "state": "parameters, moments, step counts and groups equal exactly (fp32) to the uninterrupted run's",
    "losses": "the next 5 within 1e-6 of those of the uninterrupted run",
    "after them": "every weight matrix within 1e-5 (norms) of the uninterrupted run's; bitwise on the same layout",
    "oracle": "what the layouts save is plain torch's state (1 rank, stage 0) to 1e-5 (norms), after 3 steps each",
}
ENGINES = (
    [("deepspeed", stage) for stage in (0, 1, 2, 3)]
    + [("fsdp", stage) for stage in (0, 2, 3)]
    + [("plain", 0)]
)
LAYOUTS = [Layout(world_size, *engine) for world_size in (1, 2) for engine in ENGINES]
N, LR, BEFORE, AFTER = 32, 1e-3, 3, 5
MOMENTS = ("exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")


def make_model() -> CLIP:
    torch.manual_seed(5)
    return CLIP(small_clip())


def make(layout: Layout) -> Any:
    config = OptimConfig(lr=LR, weight_decay=0.1)
    engine = layout.engine.build(
        make_model,
        lambda named: build_optimizer(config, named),
        device=CPU,
        grad_clip_norm=1.0,
        micro_size=8,
    )
    engine.load_fragments(WholeState(dict(make_model().named_parameters())), {})
    return engine


def share(step: int) -> Batch:
    """This rank's share of a fixed global batch."""
    g = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (N, 3, 32, 32), dtype=torch.uint8, generator=g)
    texts = torch.randint(1, 64, (N, 12), generator=g)
    n = N // dist.world_size()
    own = slice(dist.rank() * n, (dist.rank() + 1) * n)
    return Batch(columns_of(images[own], texts[own], torch.arange(N)[own]))


def train(engine: Any, first: int, last: int) -> list[float]:
    return [
        train_step(
            engine, share(step), InfoNCE(), micro_size=8, kept_graphs=1, lr=LR / (step + 1)
        ).loss
        for step in range(first, last)
    ]


State = dict[str, torch.Tensor]


def state(layout: Layout, engine: Any) -> tuple[State, dict[str, Any]]:
    """Every parameter and moment whole; step counts and what each parameter is optimized with."""
    of = {"fsdp": fsdp_state, "deepspeed": deepspeed_state, "plain": plain_state}
    return of[layout.kind](engine)


def plain_state(engine: Any) -> tuple[State, dict[str, Any]]:
    """In fp32 a parameter is a part of the flat tensor that the optimizer updates: the one with its memory."""
    out: State = {}
    used, steps = {}, set()
    for name, p in engine.module.named_parameters():
        for group in engine.optimizer.param_groups:
            for flat in group["params"]:
                first = (p.data_ptr() - flat.data_ptr()) // p.element_size()
                if not 0 <= first < flat.numel():
                    continue
                state_of = engine.optimizer.state[flat]
                found = {"param": flat, **{slot: state_of[slot] for slot in MOMENTS}}
                out[f"{name}|model"] = p.detach().clone()
                for slot, whole in found.items():
                    part = whole.detach().view(-1)[first : first + p.numel()]
                    out[f"{name}|{slot}"] = part.view(p.shape).clone()
                used[name] = tuple(group[key] for key in ("weight_decay", "betas", "eps"))
                steps.add(float(state_of["step"]))
    return out, {"used": used, "steps": steps}


def fsdp_state(engine: Any) -> tuple[State, dict[str, Any]]:
    """As torch's DTensor gathers it. AdamW works on local shards, which are found by their memory."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

    def whole(p: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        if not isinstance(p, DTensor):
            return shard.detach().clone()
        placed = {"shape": p.shape, "stride": p.stride()}
        shards = DTensor.from_local(shard.detach(), p.device_mesh, p.placements, **placed)
        return shards.full_tensor().clone()  # on one rank it is the shard itself

    def address(tensor: torch.Tensor) -> int:
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()

    held = {address(q): (q, g) for g in engine.optimizer.param_groups for q in g["params"]}
    out: State = {}
    used, steps = {}, set()
    for name, p in engine.module.named_parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        value = whole(p, local)
        out |= {
            f"{name}|model": value.clone(),
            f"{name}|param": value.clone(),
        }  # fp32: the masters are the model
        q, group = held.get(local.data_ptr(), (None, None)) if local.numel() else (None, None)
        for slot in MOMENTS:
            moment = torch.empty_like(local) if q is None else engine.optimizer.state[q][slot]
            moment = moment.to_local() if isinstance(moment, DTensor) else moment
            out[f"{name}|{slot}"] = whole(p, moment)
        if q is not None:  # rank 0, whose state is returned, holds rows of every parameter
            used[name] = tuple(group[key] for key in ("weight_decay", "betas", "eps"))
            steps.add(float(engine.optimizer.state[q]["step"]))
    return out, {"used": used, "steps": steps}


def deepspeed_state(engine: Any) -> tuple[State, dict[str, Any]]:
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    ds = engine.engine.optimizer
    if engine.stage in (1, 2):  # DeepSpeed links only the first group's moments, at the first step
        ds._hp_optimizer_states_linked = False
        ds._lazy_init_hp_params_optimizer_state()
    whole: State = {}
    names = {}
    for name, p in engine.engine.module.named_parameters():
        names[p] = name
        with zero.GatheredParameters([p], enabled=engine.stage == 3):
            whole[f"{name}|model"] = p.detach().clone()
        if engine.stage == 0:
            found = {"param": p, **{slot: engine.optimizer.state[p][slot] for slot in MOMENTS}}
        else:
            found = {"param": safe_get_full_fp32_param(p)}
            found |= {slot: safe_get_full_optimizer_state(p, slot) for slot in MOMENTS}
        whole |= {f"{name}|{slot}": value.detach().clone() for slot, value in found.items()}
    members = {
        0: lambda: [group["params"] for group in engine.optimizer.param_groups],
        3: lambda: ds.fp16_groups,
    }.get(engine.stage, lambda: ds.bit16_groups)()
    used = {
        names[p]: tuple(group[key] for key in ("weight_decay", "betas", "eps"))
        for group, parameters in zip(engine.optimizer.param_groups, members, strict=False)
        for p in parameters
    }
    counts = {float(of_one["step"]) for of_one in engine.optimizer.state.values()}
    return whole, {"used": used, "steps": set().union(*dist.gather_objects(counts))}


def save(layout: Layout, folder: str) -> Any:
    engine = make(layout)
    train(engine, 0, BEFORE)
    found = state(layout, engine)
    manager = CheckpointManager(CheckpointConfig(), folder)
    manager.resume()
    told = {"engine": engine.extra_state(), "step": BEFORE}
    saved = manager.save(BEFORE, engine.state_fragments(), {}, told, wait=True)
    assert saved is Saved.COMMITTED
    manager.close()
    losses = train(engine, BEFORE, BEFORE + AFTER)
    then = state(layout, engine)[0]
    engine.close()
    return found, losses, then


def resume(layout: Layout, folders: list[str]) -> Any:
    """From each of the folders in turn: the state as loaded, the losses that follow, and the state after them."""
    out = []
    for folder in folders:
        engine = make(layout)
        resumed = CheckpointManager(CheckpointConfig(resume="must"), folder).resume()
        assert resumed is not None
        engine.load_fragments(resumed.reader, resumed.state["engine"])
        loaded = state(layout, engine)
        out.append((loaded, train(engine, BEFORE, BEFORE + AFTER), state(layout, engine)[0]))
        engine.close()
    return out


def differences(saved: Any, found: Any) -> list[str]:
    (tensors, told), (again, told_again) = saved, found
    wrong = [
        name for name in tensors if name not in again or not torch.equal(tensors[name], again[name])
    ]
    wrong += [] if set(tensors) == set(again) else ["names"]
    return wrong + [key for key in told if told[key] != told_again[key]]


def distance(a: State, b: State, *slots: str) -> float:
    """The largest relative distance of two tensors, of matrices only: gradients of some biases are but rounding."""
    names = [name for name in a if name.rpartition("|")[2] in slots and a[name].dim() > 1]
    return max(float((a[name] - b[name]).norm() / a[name].norm()) for name in names)


def check_oracle(layouts: list[Layout], saved: list[Any]) -> list[str]:
    """The runs that saved, beside plain torch's on one rank: is what the accessors show the truth?"""
    missed = []
    (reference, told), _, _ = saved[0]
    for where, ((tensors, also_told), _, _) in zip(layouts, saved, strict=True):
        off = distance(reference, tensors, "param", "model", *MOMENTS)
        if set(reference) != set(tensors) or off > 1e-5:
            missed.append(f"{where}: after {BEFORE} steps {off:.1e} from plain torch")
        if also_told["steps"] != {float(BEFORE)} or also_told["used"] != told["used"]:
            missed.append(
                f"{where}: steps {also_told['steps']}, or other groups than plain torch's"
            )
        if {used[0] for used in also_told["used"].values()} != {0.0, 0.1} or len(
            also_told["used"]
        ) * 4 != len(tensors):
            missed.append(f"{where}: not every parameter is in a group")
    return missed


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    layouts = LAYOUTS[::3] if args.quick else LAYOUTS
    table = []
    with tempfile.TemporaryDirectory() as root:
        folders = [str(Path(root) / str(layout).replace(" ", "")) for layout in layouts]
        saved = [
            run_ranks(save, each.world_size, each, to)[0]
            for each, to in zip(layouts, folders, strict=True)
        ]
        missed = check_oracle(layouts, saved)
        for here in layouts:
            row: dict[str, Any] = {"resumed at": str(here)}
            found = run_ranks(resume, here.world_size, here, folders)[0]
            furthest = 0.0
            for layout, (then, losses, after), (now, again, after_again) in zip(
                layouts, saved, found, strict=True
            ):
                wrong = differences(then, now)
                off = max(abs(a - b) for a, b in zip(losses, again, strict=True))
                row[str(layout)] = off if not wrong else f"{len(wrong)} differ"
                furthest = max(furthest, distance(after, after_again, "param"))
                where = f"saved at {layout}, resumed at {here}"
                if wrong:
                    missed.append(f"{where}: {', '.join(wrong[:4])} are not equal")
                if off > 1e-6:
                    missed.append(f"{where}: the losses differ by {off:.2g}")
                if layout == here and any(
                    not torch.equal(after[name], after_again[name]) for name in after
                ):
                    missed.append(
                        f"{where}: after {AFTER} steps on the same layout not every bit is equal"
                    )
                if distance(after, after_again, "param") > 1e-5:
                    missed.append(
                        f"{where}: after {AFTER} steps the weights are {furthest:.1e} apart"
                    )
            row["weights after"] = furthest
            table.append(row)
    print(
        "each cell: state equal to the last bit, how far the next 5 losses are off; columns: saved at ranks x engine"
    )
    return finish("layouts", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
