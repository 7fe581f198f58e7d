"""Take steps under torch's fake process group and print every collective of the last one as JSON.

python -m tests.engine.wire WORLD_SIZE 'JSON list of cases'. A case is an `engine` section; "model" is
the architecture's name, "micro_batches" and "kept_graphs" cut the step. One line of JSON for each case.

No other rank exists: a gather repeats this rank's part, a sum is this rank's alone. What is sent, in
which type and how much of it, is what a real group of that size would send.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import replace
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
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

SAMPLES = 8
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
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


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
            self.depth += 1  # one operator's new name calls its old one: counted once
            done = original(*args, **kwargs)
            self.depth -= 1
            if self.depth == 0 and tensors:
                self.count(
                    name, tensors, next((g for g in given if isinstance(g, td.ProcessGroup)), None)
                )
            return done

        return call

    def count(self, name: str, tensors: list[torch.Tensor], group: Any) -> None:
        ranks = td.get_world_size(group)
        largest = max(tensors, key=torch.Tensor.numel)
        dtype = str(largest.dtype).removeprefix("torch.")
        self.calls[self.place, name, dtype, largest.numel(), ranks] += 1
        served = td.get_backend_config(group)
        self.foreign += [
            f"{name}: {t.device}" for t in tensors if f"{t.device.type}:" not in served
        ]
        if name in GATHERS and len(tensors) > 1:
            output, part = tensors[0], tensors[1]
            output.view(ranks, -1).copy_(part.reshape(1, -1).expand(ranks, -1))

    def within(self, place: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.place = "last backward" if kwargs.get("last") else place
            return function(*args, **kwargs)

        return call


def main() -> None:
    torch.set_num_threads(1)
    td.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    recorder = Recorder()
    for case in json.loads(sys.argv[2]):
        recorder.foreign.clear()
        take_steps(recorder, **case)
        calls = [[*key, times] for key, times in recorder.calls.items()]
        print(json.dumps({"calls": calls, "foreign": recorder.foreign}), flush=True)


def take_steps(
    recorder: Recorder,
    model: str = "tiny",
    micro_batches: int = 2,
    kept_graphs: int = 1,
    **section: Any,
) -> None:
    from clip_train.contrastive.info_nce import InfoNCE
    from clip_train.models.clip import CLIP
    from clip_train.models.config import load_architecture
    from clip_train.models.weights import WholeState
    from clip_train.optim.config import OptimConfig
    from clip_train.optim.optimizer import build_optimizer
    from clip_train.step import train_step
    from clip_train.task import Batch
    from launcher import engines
    from launcher.engines.config import EngineConfig

    class NeverRepeated(InfoNCE):
        """Sums that lack the other ranks' parts would look unsafe, and the step would be repeated."""

        def __call__(self, features: Any, context: Any) -> Any:
            recorder.place = "loss"
            return replace(super().__call__(features, context), unsafe=None)

    architecture = load_architecture(model)
    torch.manual_seed(0)
    engine = engines.build(
        EngineConfig(**section),
        lambda: CLIP(architecture),
        lambda named: build_optimizer(OptimConfig(), named),
        device=torch.device("cpu"),
        grad_clip_norm=1.0,
        micro_size=SAMPLES // micro_batches,
    )
    engine.load_fragments(WholeState(CLIP(architecture).state_dict()), {})
    for name in ("forward", "backward", "reduce", "step"):
        place = "step" if name == "reduce" else name
        setattr(engine, name, recorder.within(place, getattr(engine, name)))
    objective = NeverRepeated()
    size, length = architecture.vision_cfg.image_size, architecture.text_cfg.context_length
    batch = Batch(
        torch.randint(0, 255, (SAMPLES, 3, size, size), dtype=torch.uint8),
        torch.randint(1, 100, (SAMPLES, length)),
        torch.arange(SAMPLES),
        [str(i) for i in range(SAMPLES)],
        shares=(SAMPLES,) * WORLD_SIZE,
        text_lengths=[length] * SAMPLES,
    )
    zero3 = section["kind"] == "deepspeed" and section["zero_stage"] == 3
    for _ in range(3 if zero3 else 1):  # it records what it gathers in its first steps
        recorder.calls.clear()
        train_step(
            engine,
            batch,
            objective,
            micro_size=SAMPLES // micro_batches,
            kept_graphs=kept_graphs,
            lr=1e-4,
        )
    if section["kind"] == "deepspeed":
        engine.close()


if __name__ == "__main__":
    main()
