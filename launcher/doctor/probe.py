"""Run by `clip-train doctor` under torchrun: does the process group answer, and how fast? Prints one JSON line."""

from __future__ import annotations

import datetime
import json
import os
import time

import torch
import torch.distributed as torch_dist

from clip_train import dist
from launcher.runtime import environment as ranks

BYTES = 16 * 2**20
TIMEOUT = datetime.timedelta(seconds=60)  # of the rendezvous and of a collective


def measure(action_bytes: int, device: torch.device, repeats: int) -> float:
    """Seconds of one all-reduce."""
    x = torch.zeros(action_bytes // 4, device=device)
    dist.all_reduce_sum(x)
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce_sum(x)
    x.sum().item()  # waits for the device
    return (time.perf_counter() - began) / repeats


if __name__ == "__main__":
    device = ranks.take_device(ranks.detect(os.environ))
    torch_dist.init_process_group(ranks.backend(device), timeout=TIMEOUT)
    latency, seconds = measure(4, device, 20), measure(BYTES, device, 3)
    if dist.is_main():
        print(json.dumps({"device": device.type, "latency": latency, "bandwidth": BYTES / seconds}), flush=True)
    dist.barrier()
    torch_dist.destroy_process_group()
