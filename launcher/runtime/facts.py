"""What an attempt runs with, for who reads its report later: a line in `attempts.jsonl`."""

import contextlib
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from clip_train.storage.redact import redact
from launcher.config.recipe import RunConfig
from launcher.runtime.environment import RankEnv
from launcher.runtime.rendezvous import ROOT, versions
from launcher.runtime.verdict import node_name
from launcher.slurm.scheduler import answer


def facts(config: RunConfig, env: RankEnv, device: torch.device) -> dict[str, Any]:
    """As JSON has it. config: as the user gave it."""
    if device.type == "cuda":
        version, what = torch.version.cuda, torch.cuda.get_device_name(device)
    else:
        cpu = platform.processor() or platform.machine()
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    cpu = line.partition(": ")[2]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        what = f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
        version = None
    plural = "s" if env.world_size > 1 else ""
    ranks = f"{env.world_size} rank{plural} on {device.type}, {env.local_world_size} on each host"
    differing = redact(config.model_dump(mode="json", exclude_defaults=True)).items()
    return {
        "steps": config.steps,
        "command": redact(shlex.join(["clip-train", *sys.argv[1:]])),
        "commit": commit(),
        "hardware": f"{ranks}; {node_name()}: {what}",
        "versions": versions() | ({"CUDA": version} if version else {}),
        "changed": {
            f"{section}.{key}": value for section, keys in differing for key, value in keys.items()
        },
    }


def commit() -> str | None:
    """The git commit, with `-dirty` if files differ. Frozen code has the commit of its submission.
    None if there is none."""
    if (ROOT / ".git").exists():
        return (
            answer("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12") or None
        )
    with contextlib.suppress(OSError, ValueError):
        return json.loads((ROOT.parent / "submit.json").read_text()).get("commit")
    return None
