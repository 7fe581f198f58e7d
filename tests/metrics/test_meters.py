import gc
import hashlib
import resource

import torch

from clip_train.metrics.meters import BatchDigest, GarbageCollections, peak_memory_bytes


def digest(keys: list[str]) -> str:
    record = {}
    BatchDigest().after_step(record, keys, {})
    return record["batch_digest"]


def test_batch_digest_is_of_the_set() -> None:
    keys = ["shard-1/0002", "shard-1/0001", "é/3"]
    want = hashlib.sha256("shard-1/0001\nshard-1/0002\né/3".encode()).hexdigest()
    assert digest(keys) == digest(keys[::-1]) == want
    assert digest(keys[:2]) != want


def test_peak_memory_on_a_cpu_is_in_bytes() -> None:
    peak = peak_memory_bytes(torch.device("cpu"))
    assert peak == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 50e6 < peak < 100e9  # torch is loaded


def test_garbage_is_collected_at_chosen_steps_alone():
    collections = []
    gc.callbacks.append(lambda when, info: collections.append((when, info["generation"])))
    collector = GarbageCollections()
    try:
        for step in range(7, 2101):  # as in a resumed run
            collections.clear()
            collector.after_step({"step": step}, [], {})
            cycles = [[] for _ in range(1000)]  # enough to make Python itself collect
            for cycle in cycles:
                cycle.append(cycle)
            of_all = [generation for when, generation in collections if when == "start"]
            expected = [2] if step == 7 or step % 1000 == 0 else [1] if step % 50 == 0 else []
            assert of_all == expected, step
    finally:
        collector.close()
        gc.callbacks.pop()
    assert gc.isenabled() and gc.get_freeze_count() == 0
