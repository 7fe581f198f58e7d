"""`clip-train doctor --all-nodes` on a real Slurm, one node of which has a slow network."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests import lab
from tests.launcher.conftest import ROOT
from tests.slurm.cluster import SETUP, call

pytestmark = pytest.mark.slurm
# 20 Mbit/s in place of some Gbit/s
SLOW = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "64kb")


def test_the_node_with_the_slow_network_is_named(cluster, tmp_path):
    """looks at its nodes (`doctor --all-nodes`): the slow one is named"""
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0",
        "SLURM_CONF": str(cluster.lab / "slurm.conf"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    lab.call(SETUP, "exec", cluster.lab, "n3", *SLOW, "latency", "50ms")
    try:
        doctor = (sys.executable, "-m", "launcher", "doctor", "--all-nodes", "--json")
        out = call("salloc", "--nodes=3", *doctor, environ=environ, cwd=tmp_path)
    finally:
        lab.call(SETUP, "exec", cluster.lab, "n3", "tc", "qdisc", "del", "dev", "eth0", "root")
    found = [line for line in json.loads(out)["findings"] if line["check"] == "nodes"]
    levels = {line["message"].split()[0]: line["level"] for line in found}
    assert levels == {"n1": "ok", "n2": "ok", "n3": "warning"}, out
    assert found[2]["remedy"].startswith("exclude it (--exclude=n3)")
    links = [line for line in json.loads(out)["findings"] if line["check"] == "links"]
    assert {line["message"].partition(" exchange ")[0] for line in links} == {
        "n1 and n3",
        "n2 and n3",
    }
