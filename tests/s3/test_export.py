"""What can be had of a run whose files are gone: its checkpoints in the bucket are enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture, load_architecture
from clip_train.models.weights import load_openclip
from tests.launcher.conftest import MODEL, PATIENCE, RECIPE, ROOT, finish, start
from tests.s3.bucket import Bucket
from tests.s3.proxy import FaultyProxy
from tests.s3.server import Server
from tests.warm import Command

pytestmark = pytest.mark.engine

# `clip-train` that says what it has imported
COMMAND = """
import sys
from launcher.cli.main import main
status = main(sys.argv[1:])
print("deepspeed" if any(name.split(".")[0] == "deepspeed" for name in sys.modules) else "no engine")
sys.exit(status)
"""


def weights_of(attempt: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's parameters, put together as its format says, by the library of that format."""
    out: dict[str, torch.Tensor] = {}
    for path in sorted(attempt.glob("rank*.safetensors")):
        with safe_open(path, framework="pt") as f:
            shapes = json.loads(f.metadata()["shapes"])
            for key in f.keys():  # noqa: SIM118
                slot, _, rest = key.partition("|")
                if slot == "param":
                    start, _, name = rest.partition("|")
                    flat = out.setdefault(
                        name, torch.full((torch.Size(shapes[name]).numel(),), torch.nan)
                    )
                    flat[int(start) : int(start) + f.get_tensor(key).numel()] = f.get_tensor(key)
                    out[name] = flat
    return {name: flat.reshape(shapes[name]) for name, flat in out.items()}


def features(state: dict[str, torch.Tensor], architecture: Architecture) -> list[torch.Tensor]:
    model = CLIP(architecture).eval()
    model.load_state_dict(state)
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 32, 32), generator=g, dtype=torch.uint8)
    texts = torch.randint(1, 400, (4, architecture.text_cfg.context_length), generator=g)
    with torch.no_grad():
        return list(model(images, texts)[:3])


@pytest.mark.full
def test_export_and_evaluate_from_the_bucket_alone(
    tmp_path: Path, data, server: Server, proxy: FaultyProxy, bucket: str
) -> None:
    view = Bucket(server, bucket)
    url = f"{view.url}/run"
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    model = here / "mine.json"
    model.write_text(json.dumps({**MODEL, "text_cfg": {**MODEL["text_cfg"], "context_length": 12}}))
    recipe = here / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=here / "run", train=data.train, model=model))
    kind = (
        f"checkpoint.remote={url}",
        "loss.kind=sigmoid",
        "model.init_logit_bias=-10",
        "schedule.warmup_steps=1",
    )
    kind += ("engine.zero_stage=3", f"data.val={data.val}", "evaluate.retrieval=false")
    for last in (2, 4):
        status, out = finish(start(recipe, *kind, f"run.steps={last}"), timeout=900)
        assert status == 0, out
    attempts = {
        path.parts[-2]: path for path in (here / "run" / "checkpoints" / "ckpt").glob("*/*")
    }
    own = {int(step[1:]): weights_of(path) for step, path in attempts.items()}
    architecture = load_architecture_by_hand(model)
    here.rename(tmp_path / "gone")
    for leftover in (tmp_path / "gone").rglob("mine.json"):
        leftover.unlink()

    environ = {k: v for k, v in os.environ.items() if k.startswith(("AWS", "PATH", "OMP"))}
    environ |= {
        "HOME": str(elsewhere),
        "PYTHONPATH": str(ROOT),
        "CLIP_TRAIN_S3_PATIENCE_SECONDS": "120",
    }

    def command(*arguments: str) -> tuple[int, str]:
        return finish(Command(arguments, env=environ, cwd=elsewhere))

    cold = subprocess.run(
        [sys.executable, "-c", COMMAND, "export", url, "--output", "cold"],
        env=environ, cwd=elsewhere, capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert cold.returncode == 0 and "no engine" in cold.stdout, cold.stderr

    # the newest, and one by its step
    for step, *which in ((4,), (2, "--step", "2")):
        status, out = command("export", url, "--output", f"step{step}", *map(str, which))
        assert status == 0 and f"step {step} of {url}/ckpt/" in out, out
        told = load_architecture(str(elsewhere / f"step{step}"))
        state = load_openclip(elsewhere / f"step{step}", told)
        assert told.text_cfg.context_length == 12 and told.init_logit_bias == -10
        for got, want in zip(features(state, told), features(own[step], architecture), strict=True):
            assert torch.equal(got, want)
    assert not torch.equal(own[2]["visual.conv1.weight"], own[4]["visual.conv1.weight"])

    status, out = command(
        "evaluate", url
    )  # its recipe lies in the bucket: it does not choose what is opened
    assert status == 2 and f"add data.val={data.val}" in out, out
    status, out = command("evaluate", url, f"data.val={data.val}", "evaluate.retrieval=true")
    assert status == 0 and f"step 4 of {url}" in out and "image_to_text_R@1" in out, out

    # one that was not committed, and one of which a bit has changed
    (marker,) = [key for key in view.commits("run") if key.endswith("s0000000002.json")]
    view.delete(marker)
    status, out = command("export", url, "--output", "x", "--step", "2")
    assert status == 2 and "of step 2" in out and "[4]" in out, out
    (key,) = [key for key in view.keys("run/ckpt/s0000000004/") if key.endswith(".safetensors")]
    content = bytearray(view.get(key))
    content[len(content) // 8] ^= 1
    view.put(key, bytes(content))
    for verb in (
        ("export", url, "--output", "x"),
        ("export", url, "--output", "x", "--step", "4"),
        ("evaluate", url, f"data.val={data.val}"),
    ):
        status, out = command(*verb)
        assert status == 1 and key.removeprefix("run/") in out and "sha256 does not match" in out, (
            out
        )
    assert not (elsewhere / "x").exists()
    status, out = command("checkpoints", url, "--verify")
    assert status == 1 and "1 x ZeRO 3, fp32" in out, out


def load_architecture_by_hand(path: Path) -> Architecture:
    return Architecture.model_validate({**json.loads(path.read_text()), "init_logit_bias": -10.0})
