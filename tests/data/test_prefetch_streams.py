"""On a GPU the copy of the next batch overlaps the step: shown by the order of what two pretended streams are given."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

import torch

from clip_train.data.loader import Prefetcher
from clip_train.task import Batch
from tests.toy import columns_of

GPU = torch.device("cuda", 0)
PATIENCE = 60.0  # seconds
STEPS = 8


@dataclass(frozen=True)
class Event:
    after: tuple[str, int]  # a stream, and how much of its queue comes before


class Stream:
    """A queue that a device would work off: operators, and waits for events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[str | Event] = []

    def record_event(self) -> Event:
        return Event((self.name, len(self.queue)))

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)


class Device:
    """`torch.cuda` with two streams; each thread has a current one, the default one at first."""

    def __init__(self, monkeypatch) -> None:
        self.streams = {"default": Stream("default")}
        self.here = threading.local()
        self.grown = threading.Condition()
        self.recorded: list[tuple[int, str]] = []  # whose memory is another stream's too
        for name in ("stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self.make)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", None)  # a call of it fails
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda t, s: self.recorded.append((id(t), s.name))
        )

    def make(self, device: torch.device) -> Stream:
        return self.streams.setdefault("copies", Stream("copies"))

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self.here, "stream", self.streams["default"])

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        self.here.stream = stream
        yield
        del self.here.stream

    def put(self, operator: str) -> None:
        with self.grown:
            self.current_stream().queue.append(operator)
            self.grown.notify_all()

    def holds(self, stream: str, operator: str) -> bool:
        """Once `stream` has been given it, within PATIENCE."""
        with self.grown:
            return self.grown.wait_for(lambda: operator in self.streams[stream].queue, PATIENCE)

    def before(self, stream: str, place: int) -> set[str]:
        """All operators that have to end before the one at `place` of `stream` begins."""
        out: set[str] = set()
        for each in self.streams[stream].queue[:place]:
            out |= self.before(*each.after) if isinstance(each, Event) else {each}
        return out


@dataclass
class Numbered(Batch):
    """A batch that says on which stream it is copied."""

    gpu: Device | None = None

    def to(self, device: torch.device) -> Numbered:
        assert self.gpu is not None
        self.gpu.put(f"copy {self.keys[0]}")
        return self


class Source:
    """Batches 0, 1, 2, ... for `gpu`."""

    def __init__(self, gpu: Device) -> None:
        self.gpu, self.given = gpu, 0

    def __next__(self) -> Batch:
        number, self.given = self.given, self.given + 1
        columns = columns_of(torch.zeros(1), torch.zeros(1), torch.zeros(1), [str(number)])
        return Numbered(columns, gpu=self.gpu)

    def stop(self) -> None: ...
    def close(self) -> None: ...


def test_a_copy_waits_for_no_step_and_a_step_for_its_own_copy(monkeypatch):
    device = Device(monkeypatch)
    batches = Prefetcher(Source(device), GPU)
    for step in range(STEPS):
        batch = next(batches)
        assert batch.keys == [str(step)]  # none is lost or comes twice
        tensors = {id(batch.images), id(batch.texts), id(batch.sample_seeds)}
        assert {(each, "default") for each in tensors} <= set(device.recorded)
        # the copy is under way before anything of this step has been queued, let alone ended
        assert device.holds("copies", f"copy {step + 1}")
        device.put(f"step {step}")
    batches.close()

    computes, copies = device.streams["default"].queue, device.streams["copies"].queue
    assert copies == [f"copy {i}" for i in range(len(copies))]  # and no wait among them
    for step in range(STEPS):
        needed = device.before("default", computes.index(f"step {step}"))
        assert needed == {f"copy {i}" for i in range(step + 1)} | {f"step {i}" for i in range(step)}
