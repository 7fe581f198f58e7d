"""A store whose uploads and removals a test holds up."""

from __future__ import annotations

import os
import time
from typing import Any

from clip_train.storage.local import LocalStorage


class HeldStore(LocalStorage):
    """The folder in `tests.checkpoint.held.HeldStore:///folder`; uploads wait while it has a file
    `hold`, removals while it has `hold-removals`."""

    def __init__(self, url: str, **limits: Any) -> None:
        super().__init__(url.partition("://")[2])

    def put_file(self, local_path: str | os.PathLike, name: str) -> None:
        self.wait("hold")
        super().put_file(local_path, name)

    def delete(self, *names: str) -> None:
        self.wait("hold-removals")
        super().delete(*names)

    def wait(self, name: str) -> None:
        while (self.root / name).exists():
            time.sleep(0.01)
