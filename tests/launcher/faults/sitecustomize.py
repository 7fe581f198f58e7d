"""Planted faults, in one rank: Python imports this at its start where this folder is on PYTHONPATH.

FAULT=raise:1     rank 1 raises an error of its own in its fifth step; raise:1:60: in its 60th
FAULT=evaluate:1  the same in its first evaluation; evaluate:1:60: in the first from step 60 on
FAULT=snapshot:1  the same in its first save; snapshot:1:60: in the first from step 60 on
FAULT=loader:1    the same in a loader worker, in the sixth batch; loader:1:0: in the first
FAULT=engine:1    the same while it builds its engine
FAULT=alone:1     rank 1 raises what all ranks raise together otherwise
FAULT=sleep:1     rank 1 stays outside of any collective from its fifth step on
FAULT=save:1      the same within its first save, and the others outside of theirs; a save counts as a hang after 4 s
FAULT=slow:1      its saves take 13 s
FAULT=memory:1    it runs out of memory in the first forward of its sixth step, once
FAULT=drag:1      its forward passes take 0.2 s longer; ranks are compared every 0.5 s
FAULT=group:1     it has joined, and never begins to form the process group
FAULT=hold:0:17   rank 0, also where it is the only one, makes no 18th step; once it is asked to stop it goes on

$FAULT_FILE is made when the rank begins to sleep.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

fault, *of = os.environ.get("FAULT", "").split(":")
mine = bool(fault) and os.environ.get("RANK", "0") == of[0]
step = int(of[1]) if len(of) > 1 else 5


class AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "clip_train.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            plant(module.Trainer)

        spec.loader.exec_module = exec_module
        return spec


def sleep():
    Path(os.environ["FAULT_FILE"]).touch()
    time.sleep(1000)


def out_of_memory(engine):
    def forward(micro_batch):
        import torch

        del engine.forward
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    return forward


def dragging(forward):
    def slow_forward(*args):
        time.sleep(0.2)
        return forward(*args)

    return slow_forward


def broken():
    raise RuntimeError("broken on purpose")


class FaultySeeds:
    """In place of `Order.sample_seed`, which a loader worker calls for each of this rank's 16 samples of a batch."""

    def __init__(self):
        self.calls = 0

    def __call__(self, stream, number):
        self.calls += 1
        if self.calls > 16 * step:
            broken()
        return number


def plant(trainer):
    if fault == "group":
        import torch.distributed

        from launcher.runtime import rendezvous

        rendezvous.CAUSE_SECONDS = 0.0  # nobody has died
        torch.distributed.init_process_group = lambda *_, **__: sleep()
    if fault == "engine":
        sys.modules["clip_train.engines.base"].Engine.__init__ = lambda *_, **__: broken()
    next_batch, record, save = trainer._next_batch, trainer._record, trainer._save

    def faulty_next_batch(self, batches):
        while fault == "hold" and mine and self.step >= step and self.stop.look() is None:
            time.sleep(0.05)
        if fault == "memory" and mine and self.step == step:
            self.engine.forward = out_of_memory(self.engine)
        if fault == "drag" and self.step == 0:
            sys.modules["launcher.runtime.slow_rank"].WINDOW_SECONDS = 0.5
            if mine:
                self.engine.forward = dragging(self.engine.forward)
        if fault == "loader" and mine and self.step == 0:
            batches.source.order.sample_seed = FaultySeeds()
        return next_batch(self, batches)

    def faulty_record(self, *args):
        if self.step == step and fault == "raise" and mine:
            broken()
        if self.step >= step and fault == "evaluate" and mine:
            self.evaluate = broken
        if self.step == step and fault == "alone" and mine:
            from clip_train.errors import CheckpointError

            raise CheckpointError("its own disk is full")
        if self.step == step and fault == "sleep" and mine:
            sleep()
        return record(self, *args)

    def faulty_save(self, **options):
        if fault == "snapshot" and mine and self.step >= step:
            self.engine.state_fragments = broken
        if fault == "save" and mine:
            watchdog = sys.modules["launcher.runtime.watchdog"]
            watchdog.LIMITS[watchdog.Phase.SAVE] = 4.0
            self.call("phase", "save")
            sleep()
        if fault == "save":
            time.sleep(1000)
        if fault == "slow" and mine:
            time.sleep(13)
        return save(self, **options)

    trainer._next_batch, trainer._record, trainer._save = (
        faulty_next_batch,
        faulty_record,
        faulty_save,
    )


if os.environ.get("CLIP_TRAIN_TEST_JITTER") and "tests.jitter" not in sys.modules:
    from tests import jitter

    jitter.plant()  # in a process that started cold
if mine or fault in ("save", "drag"):
    if "clip_train.trainer" in sys.modules:  # in a process that started warm
        plant(sys.modules["clip_train.trainer"].Trainer)
    else:
        sys.meta_path.insert(0, AfterImport())
