"""Cores by control groups, as containers see them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clip_train.processes import usable_cores
from launcher.runtime.environment import detect, take_device

OWN = "docker/4711"


@pytest.mark.parametrize(
    "groups, files, cores",
    [
        (f"0::/{OWN}", {f"{OWN}/cpu.max": "300000 100000"}, 3),
        ("0::/", {"cpu.max": "150000 100000"}, 1),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 16),
        # a limit of the pod, above the container's own
        (f"0::/{OWN}", {"docker/cpu.max": "200000 100000", f"{OWN}/cpu.max": "max 100000"}, 2),
        ("0::/../elsewhere", {"cpu.max": "400000 100000"}, 4),
        (
            f"5:memory:/x\n4:cpu,cpuacct:/{OWN}",
            {
                f"cpu,cpuacct/{OWN}/cpu.cfs_quota_us": "250000",
                f"cpu,cpuacct/{OWN}/cpu.cfs_period_us": "50000",
            },
            5,
        ),
        # the path of the host, and the container's files at the top
        (f"4:cpu:/{OWN}", {"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000"}, 6),
        (f"4:cpu:/{OWN}", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        ("4:memory:/", {}, 16),
        (None, {}, 16),
    ],
)
def test_a_containers_limit_counts(tmp_path, monkeypatch, groups, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert usable_cores(tmp_path) == cores


def test_workers_follow_it(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    _, workers = take_device(detect({}), "auto")
    assert workers == 1


def test_this_machine():
    assert 1 <= usable_cores(Path("/")) <= len(os.sched_getaffinity(0))
