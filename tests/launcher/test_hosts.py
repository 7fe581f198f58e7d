"""Ranks on several machines without a scheduler: the hostfile, a node's options, statuses. Over ssh: tests/hosts."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from clip_train.errors import UserError
from launcher.cli.main import main
from launcher.runtime.hosts import RemoteHost, is_this_machine, read_hostfile
from launcher.runtime.launch import Node, place
from tests.launcher.conftest import (
    ENDLESS,
    finish,
    free_port,
    kill,
    start_cold,
    until,
    wait_for_step,
)

HERE = socket.gethostname()


def test_this_machine_comes_first_in_a_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(f"# two hosts\n192.0.2.7 slots=4\n\nme@{HERE} slots=4  # this one\n")
    assert [host.name for host in read_hostfile(str(file))] == [f"me@{HERE}", "192.0.2.7"]
    assert {host.slots for host in read_hostfile(str(file))} == {4}
    file.write_text("127.0.0.1\n")
    assert read_hostfile(str(file))[0].slots is None


def test_addresses_of_this_machine():
    assert is_this_machine("localhost") and is_this_machine(f"me@{HERE}")
    assert not is_this_machine("192.0.2.7") and not is_this_machine("2001:db8::7")
    if Path("/proc/net/if_inet6").exists():
        assert is_this_machine("::1")


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
        ("127.0.0.1 slots=0\n", "line 1: slots (0) must be at least 1"),
        ("127.0.0.1\nnode2:8\n", "line 2: 'node2:8' is not `NAME slots=N`"),
        ("127.0.0.1\n-Fnode2\n", "line 2: '-Fnode2' is not `NAME slots=N`"),
        (
            "192.0.2.7\nlocalhost\n",
            "has localhost for this machine, which each other host takes for",
        ),
        (f"{HERE}\nlocalhost\n192.0.2.7\n", f"under several names: {HERE}, localhost; keep"),
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


def test_slots_and_ranks_agree(tmp_path, recipe, capsys):
    file = tmp_path / "hosts"
    file.write_text(f"{HERE} slots=4\n")
    line = ["train", str(recipe), "--hostfile", str(file), "--dry-run"]
    assert main([*line, "--ranks=2"]) == 2
    assert "--ranks (2) and the slots of --hostfile (4) differ" in capsys.readouterr().err


@pytest.fixture
def ssh(tmp_path, monkeypatch) -> Path:
    """A folder in which `ssh` writes its arguments, and the first line of its input, and ends with the status in
    `status`."""
    program = tmp_path / "ssh"
    program.write_text(
        f'#!/bin/bash\ncd {tmp_path}\nprintf "%s\\n" "$@" >arguments\nhead -n 1 >input\nexit "$(cat status)"\n'
    )
    program.chmod(0o755)
    (tmp_path / "status").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_variables_travel_in_the_connection(ssh, monkeypatch):
    sent = {
        "HTTPS_PROXY": "http://me:word@proxy:1", "no_proxy": "local", "TORCHINDUCTOR_CACHE_DIR": "/c",
        "FI_PROVIDER": "efa", "AWS_SECRET_ACCESS_KEY": "word", "SSL_CERT_FILE": "/c.pem",
    }  # fmt: skip
    kept = {"CUDA_VISIBLE_DEVICES": "1", "RANK": "0", "SSH_AUTH_SOCK": "/s"}
    for name, value in (sent | kept).items():
        monkeypatch.setenv(name, value)
    line = ["train", "a b.yaml", "log.notify='$X\n\"%'"]
    host = RemoteHost("me@h2", line, {"PYTHONPATH": "/a b:"})
    assert until(lambda: host.poll() == 0)
    host.kill()
    told = json.loads((ssh / "input").read_text())
    assert told["arguments"] == line
    assert sent.items() <= told["variables"].items() and not kept.keys() & told["variables"].keys()
    words = (ssh / "arguments").read_text()
    assert "word" not in words and "'PYTHONPATH=/a b:'" in words and "ConnectTimeout=30" in words


@pytest.mark.parametrize(
    "status, said",
    [
        ("255", "ssh could not log in"),
        ("127", "its ranks were not started"),
        ("1", "with status 1"),
    ],
)
def test_a_host_that_starts_nothing_says_why(ssh, status, said):
    (ssh / "status").write_text(status)
    host = RemoteHost("h2", ["train"], {})
    assert until(lambda: host.poll() is not None)
    assert host.poll() == 1 and said in host.why_it_ended()
    host.kill()


def test_without_ssh(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="ssh was not found on this machine"):
        RemoteHost("h2", ["train"], {})


def test_the_place_of_a_node():
    assert place(None, None, None) is None
    assert place(2, 1, "node1:29500") == Node(1, 2, "node1", 29500)
    assert place(2, 1, "[2001:db8::7]:29500") == Node(1, 2, "2001:db8::7", 29500)
    for nodes, rank, master, said in (
        (2, None, None, "must be given together"),
        (2, 2, "a:1", "--node-rank (2) must be at least 0 and below --nodes (2)"),
        (2, 1, "node1", "--master (node1) must be HOST:PORT"),
        (2, 1, "node1:65536", "--master (node1:65536) must be HOST:PORT"),
        (2, 1, "node1:0", "--master (node1:0) must be HOST:PORT"),
        (2, 1, "node1:²", "--master (node1:²) must be HOST:PORT"),
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
    hosts.write_text(f"{HERE} slots=1\n192.0.2.7 slots=1\n")
    process = start_cold(recipe, f"--hostfile={hosts}")
    try:
        status, out = finish(process)
    finally:
        kill(process)
    assert status == (1 if ends == "exit 255" else 3), out
    assert f"ended by rank 1 on 192.0.2.7: {said}" in out, out
