"""`clip-train plan --gpu`: what a run would take on a GPU, against arithmetic done here by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.main import main

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
WORLD, N = 64, 32_768
ANY_GRAPHS = ("batch.kept_graphs=auto", "engine.kind=fsdp")  # the recipe has one


def planned(capsys, *line: str) -> dict:
    recipe = str(RECIPES / "vit_l14.yaml")
    assert (
        main(
            ["plan", recipe, "--world-size", str(WORLD), "--json", f"batch.global_size={N}", *line]
        )
        == 0
    )
    return json.loads(capsys.readouterr().out)


def test_what_is_usable_of_a_gpu(capsys):
    plan = planned(capsys, "--gpu", "H200", "engine.precision=bf16", "batch.micro_size=512")
    assert 0 < plan["usable_bytes"] < 141e9 * 0.9


def test_optional_graphs_leave_memory_free_without_recovery(capsys):
    limits = [
        planned(capsys, "--gpu", "A100-40", "batch.micro_size=64", *ANY_GRAPHS, *more)
        for more in ((), ("batch.micro_size=auto",))
    ]
    spared, asked = (plan["memory_limit_bytes"] for plan in limits)
    assert spared == pytest.approx(asked * 0.8 / 0.9)
    assert limits[0]["kept_graphs"] > 1


def test_higher_stages_hold_less(capsys):
    for kind in ("deepspeed", "fsdp"):
        held = []
        for stage in (1, 2, 3):
            keys = (f"engine.kind={kind}", f"engine.zero_stage={stage}", "engine.precision=bf16")
            memory = planned(capsys, "--gpu", "H100", *keys)["memory_bytes"]
            parts = ("parameters", "gradients", "optimizer", "buffers")
            held.append(sum(memory[part] for part in parts))
        assert held == sorted(held, reverse=True)


def test_tables_and_an_unknown_name(capsys):
    line = ["plan", str(RECIPES / "vit_b32.yaml"), "--world-size", "8", "--gpu", "h200"]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "GiB of the GPU are usable" in out
    assert main([*line[:-1], "H2000"]) == 2
    assert "--gpu (H2000) is not known: use one of B200, H200" in capsys.readouterr().err


def test_communication_and_what_is_recommended(capsys):
    """A network of one adapter: DeepSpeed, whose calls are all exposed, is never recommended."""
    line = ["engine.kind=deepspeed", "engine.zero_stage=2", "batch.micro_size=128"]
    found = planned(capsys, "--gpu", "H200", "--network", "400Gb", *line)["communication"]
    seconds = sum(row["seconds"] for row in found["collectives"])
    assert sum(found["exposed_seconds"].values()) == pytest.approx(seconds)
    assert found["between_nodes_bytes"] == found["bytes"]  # no groups
    recommended = found["recommended"]
    assert recommended["keys"]["engine.kind"] == "fsdp" and recommended in found["alternatives"]
    assert recommended["exposed_seconds"] < 0.2 * recommended["communication_seconds"]
    kinds = {row["keys"]["engine.kind"] for row in found["alternatives"]}
    assert kinds == {"fsdp", "deepspeed", "plain"}


def test_communication_without_links(capsys):
    recipe = str(RECIPES / "vit_b32.yaml")
    assert main(["plan", recipe, "--world-size", "16"]) == 0
    out = capsys.readouterr().out
    assert (
        "GB in all; --gpu and --network give the milliseconds" in out and "recommended" not in out
    )
    assert (
        main(["plan", recipe, "--world-size", "16", "--gpus-per-node", "4", "--gpu", "H100"]) == 0
    )
    assert "recommended" not in capsys.readouterr().out  # who knows what is between the nodes
    assert main(["plan", recipe, "--world-size", "8", "--gpu", "H100"]) == 0
    assert ", 0 GB between nodes: " in capsys.readouterr().out
    assert main(["plan", recipe, "--network", "400Gb"]) == 2
    assert "--network (400Gb) needs --gpu" in capsys.readouterr().err
