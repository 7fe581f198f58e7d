"""`clip-train reinforce`, and students of its shards, through the real command."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from clip_tools.reinforce import Options, write_missing
from clip_train.errors import UserError
from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.models.weights import export_openclip
from clip_train.resizing import AS_CLIP, Resize
from tests import tolerances
from tests.launcher.conftest import metrics, run

pytestmark = pytest.mark.engine
TAUGHT = (
    "run.steps=4",
    "schedule.warmup_steps=0",
    "data.caption_key={txt: 0.5, syn.json: 0.5}",
    "loss.teacher_scales=[70, 20.5]",
    "loss.teacher_weights=[2, 1]",
    "loss.distill_weights=[0.25, 0.75]",
)


def members_of(shard) -> dict[str, dict[str, bytes]]:
    """By key and extension."""
    out: dict[str, dict[str, bytes]] = {}
    with tarfile.open(shard) as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            out.setdefault(key, {})[extension] = tar.extractfile(member).read()
    return out


@pytest.fixture
def teachers(tmp_path, model) -> list[str]:
    torch.manual_seed(1)  # another test's order must not choose the weights
    architecture = load_architecture(str(model))
    return [
        str(export_openclip(CLIP(architecture).state_dict(), architecture, tmp_path / name))
        for name in ("one", "other")
    ]


def reinforce(shards, teachers, *more, ranks=1):
    return run(Path(shards), "--teacher", ",".join(teachers), *more, verb="reinforce", ranks=ranks)


def test_a_student_of_shards_equals_a_student_of_the_teachers(recipe, data, teachers, tmp_path):
    made = tmp_path / "made"
    given = ("--augmentations", "3", "--to", str(made), "--synthetic-key", "txt")
    status, out = reinforce(data.train, teachers, *given, ranks=2)
    assert status == 0 and "data.reinforced='[32, 32]'" in out, out
    shards = sorted(made.glob("*.tar"))
    before = {shard.name: shard.stat().st_mtime_ns for shard in shards}
    shards[1].unlink()
    status, out = reinforce(data.train, teachers, *given)  # goes on where it was
    assert status == 0 and out.count("samples") == 1, out
    after = {shard.name: shard.stat().st_mtime_ns for shard in shards}
    assert {name for name in after if after[name] != before[name]} == {shards[1].name}
    sample = next(iter(members_of(shards[0]).values()))
    arrays = np.load(io.BytesIO(sample["npz"]))
    assert arrays["image_emb"].shape == (3, 64) and arrays["text_emb"].shape == (2, 64)
    assert len(json.loads(sample["paug.json"])["param_aug"]) == 3

    curves = {}
    online = f"model.teacher=[{', '.join(teachers)}]"
    for name, more in {
        "online": (online, "data.reinforced=[]"),
        "offline": ("data.reinforced=[32,32]",),
    }.items():
        status, out = run(
            recipe, *TAUGHT, f"data.train={made}/*.tar", f"run.dir={tmp_path / name}", *more
        )
        assert status == 0, out
        curves[name] = [
            line[key] for line in metrics(tmp_path / name) for key in ("loss", "distill_loss")
        ]
    assert curves["offline"] == pytest.approx(curves["online"], rel=tolerances.loss(4))


def test_a_teachers_url_signature_is_not_written_or_compared(tmp_path):
    options = Options(augmentations=3, crop=0.9, synthetic_key="s", half=False, alpha="white")
    to = str(tmp_path)
    url = "https://host/{}/model?X-Amz-Date=2{}&X-Amz-Signature={}"
    for signature in ("abc123", "def456"):
        teacher = SimpleNamespace(where=url.format("one", signature, signature), resize=AS_CLIP)
        write_missing(to, [], [teacher], options)
    kept = (tmp_path / "reinforced.json").read_text()
    assert "https://host/one/model?" in kept and "abc123" not in kept
    with pytest.raises(UserError, match="give another place"):
        teacher = SimpleNamespace(where=url.format("other", "abc123", "abc123"), resize=AS_CLIP)
        write_missing(to, [], [teacher], options)
    with pytest.raises(UserError, match="give another place"):  # with other crops
        squash = Resize(resize_mode="squash")
        teacher = SimpleNamespace(where=url.format("one", "abc123", "abc123"), resize=squash)
        write_missing(to, [], [teacher], options)
