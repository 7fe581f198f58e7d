"""Take steps under torch's fake process group and print every collective of the last one as JSON.

python -m tests.engine.wire WORLD_SIZE 'JSON list of recipes'. One line of JSON for each recipe.

There are no other ranks: a gather repeats this rank's part, a sum has this rank's alone, and received tensors
are zero. The operators, types and bytes are those of a real group of that size.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

WORLD_SIZE = int(sys.argv[1])
os.environ.update(
    DS_ACCELERATOR="cpu",
    RANK="0",
    WORLD_SIZE=str(WORLD_SIZE),
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="1",
)

import torch  # noqa: E402
import torch.distributed as td  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from tests.served import foreign, start  # noqa: E402
from tests.toy import columns_of  # noqa: E402

GATHERS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_into_tensor_coalesced",
)
NAMES = (
    *GATHERS,
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "irecv",
    "isend",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


NOTHING = SimpleNamespace(wait=lambda: None)


class Recorder:
    """Counts (place in the step, operator, type, elements of the larger tensor, ranks of the group)."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, str, int, int]] = Counter()
        self.foreign: list[str] = []  # tensors on a device that their group does not serve
        self.place = ""
        self.depth = 0
        for name in NAMES:
            if hasattr(td, name):
                wrapped = self.wrap(name, getattr(td, name))
                setattr(td, name, wrapped)
                setattr(td.distributed_c10d, name, wrapped)

    def wrap(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            tensors = [t for t in given if isinstance(t, torch.Tensor)]
            group = next((g for g in given if isinstance(g, td.ProcessGroup)), None)
            sent = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
            self.foreign += [f"{name}: {device}" for device in foreign(sent, group)]
            self.depth += 1  # one operator's new name calls its old one: counted once
            # the fake group asks that a rank sends where it receives
            done: Any = NOTHING if name == "all_to_all_single" else original(*args, **kwargs)
            self.depth -= 1
            if name == "irecv":
                tensors[0].zero_()
            elif self.depth == 0 and tensors:
                self.count(name, tensors, group)
            return done

        return call

    def count(self, name: str, tensors: list[torch.Tensor], group: Any) -> None:
        ranks = td.get_world_size(group)
        largest = max(tensors, key=torch.Tensor.numel)
        dtype = str(largest.dtype).removeprefix("torch.")
        self.calls[self.place, name, dtype, largest.numel(), ranks] += 1
        if name in GATHERS and len(tensors) > 1:
            output, part = tensors[0], tensors[1]
            output.view(ranks, -1).copy_(part.reshape(1, -1).expand(ranks, -1))

        if name == "all_to_all_single":
            tensors[0].zero_()

    def within(self, place: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.place = "last backward" if kwargs.get("last") else place
            return function(*args, **kwargs)

        return call


def main() -> None:
    from launcher.runtime.environment import BACKENDS

    torch.set_num_threads(1)
    torch.compiler.set_default_backend("eager")  # what blocks become is not what they send
    start(BACKENDS["cpu"], WORLD_SIZE)
    recorder = Recorder()
    for recipe in json.loads(sys.argv[2]):
        recorder.foreign.clear()
        take_steps(recorder, recipe)
        calls = [[*key, times] for key, times in recorder.calls.items()]
        print(json.dumps({"calls": calls, "foreign": recorder.foreign}), flush=True)


def take_steps(recorder: Recorder, recipe: dict[str, Any]) -> None:
    from clip_train.models.clip import build_model
    from clip_train.models.weights import WholeState
    from clip_train.recipe.recipe import Recipe
    from clip_train.recipe.resolve import resolve
    from clip_train.step import train_step
    from clip_train.task import Batch, named_features
    from launcher.train import build_engine

    resolved = resolve(Recipe.model_validate(recipe), WORLD_SIZE, read_data=False)
    config, architecture, plan = resolved.config, resolved.architecture, resolved.plan
    torch.manual_seed(0)
    engine = build_engine(resolved, torch.device("cpu"))
    engine.load_fragments(WholeState(build_model(architecture).state_dict()), {})
    for name in ("forward", "backward", "reduce", "step"):
        place = "step" if name == "reduce" else name
        setattr(engine, name, recorder.within(place, getattr(engine, name)))
    teachers = [
        build_model(each).requires_grad_(False) for each in config.model.teacher_architectures()
    ]
    taught = [lambda m, t=t: named_features(*t(m.images, m.texts)) for t in teachers]
    objective = config.loss.build(taught)
    objective.__class__ = never_repeated(type(objective), recorder)
    n, size, length = (
        plan.per_rank,
        architecture.vision_cfg.image_size,
        architecture.text_cfg.context_length,
    )
    lengths = [3 + i % (length - 3) for i in range(n)]
    batch = Batch(
        columns_of(
            torch.randint(0, 255, (n, 3, size, size), dtype=torch.uint8),
            torch.randint(1, 100, (n, length)),
            torch.arange(n),
            [str(i) for i in range(n)],
            text_lengths=lengths,
        ),
        shares=(n,) * WORLD_SIZE,
        pack_texts=resolved.padded_because is None,
    )
    batch.texts[torch.arange(n), torch.tensor(lengths) - 1] = architecture.text_cfg.vocab_size - 1
    zero3 = config.engine.kind == "deepspeed" and config.engine.zero_stage == 3
    # ZeRO 3 records what it gathers in its first steps, and a bank is full after one
    for _ in range(3 if zero3 or config.loss.kind == "memory_bank" else 1):
        recorder.calls.clear()
        train_step(
            engine,
            batch,
            objective,
            micro_size=plan.micro_size,
            kept_graphs=plan.kept_graphs,
            lr=1e-4,
        )
    engine.close()


def never_repeated(kind: type, recorder: Recorder) -> type:
    """Sums that lack the other ranks' parts would look unsafe, and the step would be repeated."""

    def call(self: Any, features: Any, context: Any) -> Any:
        recorder.place = "loss"
        return replace(kind.__call__(self, features, context), unsafe=None)

    return type(kind.__name__, (kind,), {"__call__": call})


if __name__ == "__main__":
    main()
