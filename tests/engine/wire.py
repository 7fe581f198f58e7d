"""Take a bf16 step under torch's fake process group and print every collective as JSON.

python -m tests.engine.wire KIND STAGE WORLD_SIZE [KEY=VALUE of the engine section ...]

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

WORLD_SIZE = int(sys.argv[3])
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

MICRO_BATCHES, SAMPLES = 2, 8
SENDS = (
    "all_reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "reduce",
    "all_to_all_single",
)
GATHERS = ("all_gather_into_tensor", "all_gather_single", "all_gather_into_tensor_coalesced")


class Recorder:
    """Counts (operator, type, elements of the larger tensor) of what torch.distributed is asked."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.depth = 0
        for name in (*SENDS, *GATHERS):
            if hasattr(td, name):
                wrapped = self.wrap(name, getattr(td, name))
                setattr(td, name, wrapped)
                setattr(td.distributed_c10d, name, wrapped)

    def wrap(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            self.depth += 1  # one operator's new name calls its old one: counted once
            done = original(*args, **kwargs)
            self.depth -= 1
            if self.depth == 0 and tensors:
                largest = max(tensors, key=torch.Tensor.numel)
                self.calls[name, str(largest.dtype).removeprefix("torch."), largest.numel()] += 1
                if name in GATHERS:
                    output, part = tensors[0], tensors[1]
                    output.view(WORLD_SIZE, -1).copy_(part.reshape(1, -1).expand(WORLD_SIZE, -1))
            return done

        return call


def main() -> None:
    torch.set_num_threads(1)
    td.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    recorder = Recorder()
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
            return replace(super().__call__(features, context), unsafe=None)

    tiny = load_architecture("tiny")
    torch.manual_seed(0)
    model = CLIP(tiny)
    section: dict[str, Any] = {
        "kind": sys.argv[1],
        "zero_stage": int(sys.argv[2]),
        "precision": "bf16",
    }
    section |= dict(pair.split("=") for pair in sys.argv[4:])
    engine = engines.build(
        EngineConfig(**section),
        lambda: CLIP(tiny),
        lambda named: build_optimizer(OptimConfig(), named),
        device=torch.device("cpu"),
        grad_clip_norm=1.0,
        micro_size=SAMPLES // MICRO_BATCHES,
    )
    engine.load_fragments(WholeState(model.state_dict()), {})
    size, length = tiny.vision_cfg.image_size, tiny.text_cfg.context_length
    batch = Batch(
        torch.randint(0, 255, (SAMPLES, 3, size, size), dtype=torch.uint8),
        torch.randint(1, 100, (SAMPLES, length)),
        torch.arange(SAMPLES),
        [str(i) for i in range(SAMPLES)],
        shares=(SAMPLES,) * WORLD_SIZE,
        text_lengths=[length] * SAMPLES,
    )
    recorder.calls.clear()
    train_step(
        engine, batch, NeverRepeated(), micro_size=SAMPLES // MICRO_BATCHES, kept_graphs=1, lr=1e-4
    )
    parameters = sum(p.numel() for p in model.parameters())
    rows = [[*key, times] for key, times in recorder.calls.items()]
    # FSDP cuts the first dimension of each parameter, whose last shards may be padding
    padded = sum(
        -(-p.shape[0] // WORLD_SIZE) * WORLD_SIZE * (p.numel() // p.shape[0])
        for p in model.parameters()
    )
    print(json.dumps({"parameters": parameters, "padded": padded, "calls": rows}))


if __name__ == "__main__":
    main()
