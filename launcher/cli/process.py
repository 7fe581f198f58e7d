"""What a verb may use of the process that runs it, beside its own arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clip_train.stop import StopRequest
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.outcome import Outcome

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Process:
    """This process, for verbs that train, form a group of ranks, or show progress."""

    arguments: list[str]  # the command line, which `train` gives to the ranks that it starts
    stop: StopRequest
    outcome: Outcome
    quiet: bool  # --quiet: no progress bars

    @contextmanager
    def as_rank(self) -> Iterator[torch.device]:
        """Yield this rank's device. Inside the block, the ranks that a launcher has started form
        one group."""
        import torch.distributed as torch_dist

        from launcher.runtime import environment, rendezvous

        env = environment.detect(os.environ)
        device, _ = environment.take_device(env)
        self.outcome.heartbeat = Heartbeat(env, self.outcome.publish)
        rendezvous.start(env, device, self.outcome.heartbeat)
        try:
            yield device
        finally:
            torch_dist.destroy_process_group()
