"""Two hosts of one rank each, started by hand, that know each other's names and see each other's files wrongly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import SETUP
from tests.launcher.conftest import ROOT, finish, free_port, kill, metrics

pytestmark = pytest.mark.hosts
LINE = (
    "run.steps=3",
    "schedule.warmup_steps=0",
    "launch.rendezvous_seconds=60",
    "launch.group_seconds=20",
)


def addresses(hosts: Path) -> dict[str, str]:
    """Host -> its address on the network of both."""
    lines = [line.split() for line in (hosts / "hosts").read_text().splitlines()]
    return {name: address for address, name in lines if name in ("h1", "h2")}


def train(
    hosts: Path,
    recipe: Path,
    names: list[dict[str, str]],
    before: str = "true",
    more: dict[str, str] | None = None,
) -> list[tuple[int, str]]:
    """Exit status and output of rank 0 on h1 and rank 1 on h2. MASTER_ADDR is h1.

    names: for each host, its /etc/hosts beside localhost: name -> address. before: a shell command that h2 runs first.
    more: of the environment.
    """
    port = str(free_port())
    ranks = []
    for rank, known in enumerate(names):
        table = recipe.parent / f"hosts.{rank}"
        lines = [f"{address} {name}" for name, address in known.items()]
        table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        setup = f"mount --bind {table} /etc/hosts && {before if rank else 'true'}"
        shell = f'{setup} && cd {recipe.parent} && exec "$@"'
        environ = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": str(rank),
            "MASTER_ADDR": "h1", "MASTER_PORT": port,
            **(more or {}),
        }  # fmt: skip
        command = [
            SETUP, "exec", hosts, f"h{rank + 1}", "unshare", "--mount", "bash", "-c", shell, "bash",
            sys.executable, "-m", "launcher", "train", recipe, *LINE,
        ]  # fmt: skip
        ranks.append(
            subprocess.Popen(
                command,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        return [finish(rank) for rank in reversed(ranks)][::-1]
    finally:
        for rank in ranks:
            kill(rank)


def test_an_unresolved_host_name_and_the_missing_rank_are_named(hosts, recipe, tmp_path):
    right = addresses(hosts)
    (first, here), (second, there) = train(hosts, recipe, [right, {"h2": right["h2"]}])
    assert [first, second] == [1, 1], here + there
    assert "rank 1 on h2 cannot resolve MASTER_ADDR (h1), rank 0's node" in there, there
    assert "correct DNS or /etc/hosts on h2" in there, there
    assert "1 of 2 ranks have joined at h1:" in here and "missing: rank 1" in here, here
    assert "lost contact" not in here + there, here + there
    assert metrics(tmp_path / "run") == []


def test_a_disk_of_its_own_on_one_host_is_refused_at_the_start(hosts, recipe, tmp_path):
    (tmp_path / "run").mkdir()
    before = f"mount -t tmpfs disk {tmp_path / 'run'}"
    right = addresses(hosts)
    ended = train(hosts, recipe, [right, right], before)
    out = "".join(out for _, out in ended)
    assert [status for status, _ in ended] == [2, 2], out
    assert "is not shared: h2 cannot see what rank 0 writes" in out, out
    assert metrics(tmp_path / "run") == []


def test_a_host_that_resolves_to_loopback_needs_an_interface(hosts, recipe, tmp_path):
    """Debian writes `127.0.1.1 <own name>` into /etc/hosts, and gloo publishes that address."""
    right = addresses(hosts)
    names = [{**right, own: "127.0.1.1"} for own in ("h1", "h2")]
    ended = train(hosts, recipe, names)
    out = "".join(out for _, out in ended)
    assert [status for status, _ in ended] == [1, 1], out
    assert "is GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME needed?" in out, out
    assert "lost contact" not in out and metrics(tmp_path / "run") == [], out
    ended = train(hosts, recipe, names, more={"GLOO_SOCKET_IFNAME": "eth0"})
    assert [status for status, _ in ended] == [0, 0], ended
    assert len(metrics(tmp_path / "run")) == 3
