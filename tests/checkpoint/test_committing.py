"""How rank 0 learns that the others' parts are there."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clip_train.checkpoint import layout, lease
from clip_train.checkpoint.committing import Committer, put_word
from clip_train.checkpoint.order import Order
from clip_train.storage import LocalStorage
from clip_train.storage.base import Entry

WORLD_SIZE = 200


class Shop(LocalStorage):
    """Counts what is asked of it, never lists the words of the ranks 40 to 59, and has the later half's at the third
    look."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.looks, self.asked = 0, Counter[str]()
        self.third_look: Callable[[], None] = lambda: None

    def list(self, prefix: str = "") -> list[Entry]:
        self.looks += prefix.startswith("ckpt/")
        if self.looks == 3:
            self.third_look()
        return [
            each for each in super().list(prefix) if "/_rank0004" not in each.name and "/_rank0005" not in each.name
        ]

    def read_bytes(self, name: str) -> bytes:
        if "/_rank" in name:
            self.asked[name] += 1
        return super().read_bytes(name)


def test_of_many_ranks_only_the_words_that_are_there_are_asked_for(tmp_path: Path) -> None:
    storage = Shop(tmp_path)
    state: Any = layout.encode_state({"step": 7})
    order = Order(7, layout.new_prefix(0, 7), 0, 0, WORLD_SIZE, 0, state)
    held = lease.acquire(storage)

    def put(ranks: range) -> None:
        for rank in ranks:
            put_word(storage, dataclasses.replace(order, rank=rank), {"files": []})

    put(range(100))
    storage.third_look = lambda: put(range(100, WORLD_SIZE))
    Committer(None, held, 3600.0, lambda text: None).commit(storage, order)
    assert storage.exists(order.ref.name) and len(storage.asked) == WORLD_SIZE
    # each word once when it is there, and in each look eight that may not be
    assert storage.asked.total() <= WORLD_SIZE + 8 * storage.looks
