"""The next batch is assembled and copied to the device while the device computes this one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

from clip_train.protocols import Batch


class Source(Protocol):
    def __next__(self) -> Batch: ...
    def close(self) -> None: ...


class Prefetcher:
    """Batches of `source` on `device`, in its order, one ahead. Closing it closes the source.

    A thread takes them from the source and, on a GPU, copies them from pinned memory on a stream of its own; the
    stream that computes waits for the copy, and the host for nothing. What the source raises is raised here.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self._ready: queue.Queue[tuple[Batch, torch.cuda.Event | None] | BaseException] = queue.Queue(1)
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._thread is None:
            first = self._to_device(next(self.source))  # here: what the source starts needs the main thread
            self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
            self._thread.start()
            return self._received(*first)
        got = self._ready.get()
        if isinstance(got, BaseException):
            self.close()
            raise got
        return self._received(*got)

    def close(self) -> None:
        """Nothing more is given."""
        self._closed = True
        self.source.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            with contextlib.suppress(queue.Empty):
                self._ready.get_nowait()  # the thread may be waiting for a place
            self._thread.join(timeout=5.0)

    def _fill(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.device)
        while not self._closed:
            try:
                made: tuple[Batch, torch.cuda.Event | None] | BaseException = self._to_device(next(self.source))
            except BaseException as e:
                made = e
            self._ready.put(made)
            if isinstance(made, BaseException):
                return

    def _to_device(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        if self._stream is None:
            return batch.to(self.device), None
        with torch.cuda.stream(self._stream):
            return batch.to(self.device), self._stream.record_event()

    def _received(self, batch: Batch, copied: torch.cuda.Event | None) -> Batch:
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in (batch.images, batch.texts, batch.sample_seeds):
                tensor.record_stream(current)  # its memory is not the copying stream's again before this one is done
        return batch
