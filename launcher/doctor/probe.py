"""Run by `clip-train doctor` under torchrun: does the process group answer, and how fast? Prints one JSON line."""

from __future__ import annotations

import json
import os
import time

import torch

from clip_train import dist
from launcher.runtime import environment as ranks
from launcher.runtime import rendezvous
from launcher.runtime.heartbeat import Heartbeat

BYTES = 16 * 2**20
RENDEZVOUS_SECONDS = 60  # and of a collective


def measure(action_bytes: int, device: torch.device, repeats: int) -> float:
    """Seconds of one all-reduce."""
    x = torch.zeros(action_bytes // 4, device=device)
    dist.all_reduce_sum(x)
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce_sum(x)
    x.sum().item()  # waits for the device
    return (time.perf_counter() - began) / repeats


def main() -> None:
    env = ranks.detect(os.environ)
    device = ranks.take_device(env)
    heartbeat = Heartbeat(env)
    rendezvous.start(env, device, heartbeat, timeout_seconds=RENDEZVOUS_SECONDS)
    latency, seconds = measure(4, device, 20), measure(BYTES, device, 3)
    if dist.is_main():
        found = {"ranks": env.world_size, "device": device.type, "latency": latency, "bandwidth": BYTES / seconds}
        print(json.dumps(found), flush=True)
    dist.barrier()
    rendezvous.stop()
    heartbeat.leave()


if __name__ == "__main__":
    main()
