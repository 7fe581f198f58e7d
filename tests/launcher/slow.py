"""Code of a user's own that does not end, for recipes: each makes the file $SLEEPS when it begins to sleep."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from clip_train.callbacks import Callback
from clip_train.storage.local import LocalStorage
from examples.towers import Towers

SLEEPS = "SLEEPS"  # in the environment: the file


def sleep() -> None:
    Path(os.environ[SLEEPS]).touch()
    time.sleep(1000)


class SlowTowers(Towers):
    """`model.name`: building it does not end."""

    def __init__(self) -> None:
        sleep()
        super().__init__()


class SlowStep(Callback):
    """`log.callbacks`: each step takes two seconds."""

    def after_step(self, *args: Any) -> None:
        Path(os.environ[SLEEPS]).touch()
        time.sleep(2.0)


class SlowClose(Callback):
    """`log.callbacks`: the run cannot be closed, as where a logging service does not answer."""

    def close(self) -> None:
        sleep()


class SlowWrites(LocalStorage):
    """`checkpoint.remote`: as SlowReads, and each file takes a second."""

    def __init__(self, url: str, **limits: Any) -> None:
        super().__init__(url.partition("://")[2])

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        time.sleep(1.0)
        return super().put_bytes(name, data, if_absent=if_absent)


class SlowReads(LocalStorage):
    """`checkpoint.remote`: the folder in `tests.launcher.slow.SlowReads:///folder`. No checkpoint can be read."""

    def __init__(self, url: str, **limits: Any) -> None:
        super().__init__(url.partition("://")[2])

    def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        if name.startswith("ckpt/"):
            sleep()
        return super().read_bytes(name, start, end)
