"""Ranks on several machines without a scheduler: the hostfile, a node's options, statuses. Over ssh: tests/hosts."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from clip_train.errors import UserError
from launcher.runtime.hosts import read_hostfile
from launcher.runtime.launch import Node, place
from tests.launcher.conftest import ENDLESS, finish, free_port, kill, start_cold, wait_for_step

HERE = socket.gethostname()


def test_this_machine_comes_first_in_a_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two hosts\n192.0.2.7 slots=4\n\nme@127.0.0.1 slots=4  # this one\n")
    assert [host.name for host in read_hostfile(str(file))] == ["me@127.0.0.1", "192.0.2.7"]
    assert {host.slots for host in read_hostfile(str(file))} == {4}
    file.write_text("127.0.0.1\n")
    assert read_hostfile(str(file))[0].slots is None


@pytest.mark.parametrize(
    "text, said",
    [
        ("192.0.2.7\n192.0.2.8\n", f"but not this machine ({HERE}): run the command on one"),
        (
            "127.0.0.1 slots=2\n192.0.2.7 slots=4\n",
            "the same number of slots; found 127.0.0.1 2, 192.0.2.7 4",
        ),
        ("127.0.0.1\n127.0.0.1\n", "has 127.0.0.1 twice"),
        ("127.0.0.1\nnode2 gpus=8\n", "line 2: 'node2 gpus=8' is not `NAME slots=N`"),
        ("", "has no host, but not this machine"),
        (None, "cannot be read: No such file"),
    ],
)
def test_mistakes_in_a_hostfile(tmp_path, text, said):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError) as e:
        read_hostfile(str(file))
    assert said in str(e.value)


def test_the_place_of_a_node():
    assert place(None, None, None) is None
    assert place(2, 1, "node1:29500") == Node(1, 2, "node1", 29500)
    for nodes, rank, master, said in (
        (2, None, None, "must be given together"),
        (2, 2, "a:1", "--node-rank (2) must be at least 0 and below --nodes (2)"),
        (2, 1, "node1", "--master (node1) must be HOST:PORT"),
    ):
        with pytest.raises(UserError) as e:
            place(nodes, rank, master)
        assert said in str(e.value)


@pytest.mark.distributed
def test_each_node_ends_with_the_status_of_the_run(recipe, tmp_path):
    """TERM to the second of two nodes, as Kubernetes drains one: all ranks save, and both end with 75."""
    port = free_port()
    options = [*ENDLESS, "checkpoint.every_steps=3", "--ranks=1", "--nodes=2"]
    master = f"--master=127.0.0.1:{port}"
    nodes = [start_cold(recipe, *options, master, f"--node-rank={rank}") for rank in range(2)]
    try:
        wait_for_step(tmp_path / "run", 4, nodes[0])
        os.kill(nodes[1].pid, signal.SIGTERM)
        ended = [finish(node) for node in nodes]
    finally:
        for node in nodes:
            kill(node)
    assert [status for status, _ in ended] == [75, 75], ended
    assert "rank 0 of 2 (local 0)" in ended[0][1]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "ends, said",
    [
        ("exit 255", "ssh could not log in, or lost the connection (its message is above)"),
        ("exit 3", "its ranks ended with status 3 before all had joined"),
    ],
)
def test_a_host_that_does_not_start_ends_the_ranks_that_wait_for_it(
    recipe, tmp_path, monkeypatch, ends, said
):
    """In place of ssh a script that fails. launch.rendezvous_seconds is 600."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\n{ends}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=1\n192.0.2.7 slots=1\n")
    process = start_cold(recipe, f"--hostfile={hosts}")
    try:
        status, out = finish(process)
    finally:
        kill(process)
    assert status == (1 if ends == "exit 255" else 3), out
    assert f"ended by rank 1 on 192.0.2.7: {said}" in out, out
