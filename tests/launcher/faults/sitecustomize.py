"""Planted faults, in one rank: Python imports this at its start where this folder is on PYTHONPATH.

FAULT=raise:1   rank 1 raises an error of its own in its fifth step
FAULT=sleep:1   rank 1 stays outside of any collective from its fifth step on
FAULT=save:1    the same within its first save
FAULT=slow:1    its saves take 13 s
"""

import importlib.abc
import importlib.util
import os
import sys
import time

fault, _, faulty_rank = os.environ.get("FAULT", "").partition(":")


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


def plant(trainer):
    record, save = trainer._record, trainer._save

    def faulty_record(self, *args):
        if self.position.step == 5 and fault == "raise":
            raise RuntimeError("broken on purpose")
        if self.position.step == 5 and fault == "sleep":
            time.sleep(1000)
        record(self, *args)

    def faulty_save(self, **options):
        if fault == "save":
            self.phase("save")
            time.sleep(1000)
        if fault == "slow":
            time.sleep(13)
        return save(self, **options)

    trainer._record, trainer._save = faulty_record, faulty_save


if fault and os.environ.get("RANK") == faulty_rank:
    sys.meta_path.insert(0, AfterImport())
