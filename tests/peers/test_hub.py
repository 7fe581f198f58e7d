"""Weights from the hub, through huggingface_hub itself, from a server on loopback."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.errors import UserError
from clip_train.models.hub import HubPlace, resolve
from clip_train.models.weights import export_openclip, load_openclip
from tests.models.small import small_architecture, small_model
from tests.peers.hub import COMMIT, Hub

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
pytest.importorskip(
    "huggingface_hub",
    reason="PEER MISSING: nothing was fetched from a hub. Run scripts/setup_peers.sh, then "
    ".venv-peers/bin/python -m pytest -m peer",
)
ROOT = Path(__file__).resolve().parents[2]
# It reads its environment when it is imported, so each fetch is a process.
FETCH = """
import sys
from clip_train.errors import ClipTrainError
from clip_train.models.hub import fetch
try:
    print(fetch(sys.argv[1]))
except ClipTrainError as e:
    sys.exit(f"{type(e).__name__}: {e}")
"""
SAFETENSORS, CONFIG = "open_clip_model.safetensors", "open_clip_config.json"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """With the repository me/clip."""
    folder = export_openclip(
        small_model(seed=4).state_dict(), small_architecture(), tmp_path / "export"
    )
    with Hub() as hub:
        hub.files = {("me/clip", file.name): file.read_bytes() for file in folder.iterdir()}
        yield hub


def fetch(hub: Hub, place: str, home: Path, script: str = FETCH, **environ: str) -> tuple[str, str]:
    """(the file's path, or what was said instead; all that was said)"""
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        **environ,
    }
    done = subprocess.run(
        [sys.executable, "-c", script, place],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return (
        done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
    ), done.stderr


def asked(hub: Hub) -> list[str | None]:
    """The ranges of the weights that were asked for."""
    return [
        asked
        for method, path, asked in hub.requests
        if method == "GET" and path.endswith(SAFETENSORS)
    ]


def test_weights_are_fetched_once_and_found_in_the_cache(tmp_path: Path, hub: Hub):
    path, said = fetch(hub, "hf-hub:me/clip", tmp_path / "home")
    loaded = load_openclip(path, small_architecture())
    assert all(
        torch.equal(loaded[name], tensor)
        for name, tensor in small_model(seed=4).state_dict().items()
    ), said
    assert Path(path).parent.name == COMMIT and (Path(path).parent / CONFIG).is_file()
    hub.requests.clear()
    assert fetch(hub, "hf-hub:me/clip", tmp_path / "home")[0] == path
    assert asked(hub) == []
    assert fetch(hub, f"hf-hub:me/clip@{COMMIT}", tmp_path / "home", HF_HUB_OFFLINE="1")[0] == path


def test_a_download_that_is_cut_goes_on_where_it_was(tmp_path: Path, hub: Hub):
    """In pieces of the library's 10 MiB; of the first answer one comes, of the second another."""
    hub.files["me/large", SAFETENSORS] = content = random.Random(0).randbytes(36 << 20)
    hub.cut = 2
    path, said = fetch(hub, "hf-hub:me/large", tmp_path / "home")
    assert Path(path).read_bytes() == content, said
    assert asked(hub) == [None, f"bytes={10 << 20}-", f"bytes={20 << 20}-"]


def test_damage_is_fetched_again_and_refused_where_it_stays(tmp_path: Path, hub: Hub):
    hub.damaged = 1
    path, said = fetch(hub, "hf-hub:me/clip", tmp_path / "home")
    assert load_openclip(path, small_architecture()), said
    blob = Path(path).resolve()  # and one that rots in the cache
    blob.write_bytes(blob.read_bytes()[:-1] + b"\0\0")
    assert fetch(hub, "hf-hub:me/clip", tmp_path / "home")[0] == path
    assert load_openclip(path, small_architecture())
    hub.damaged = 9
    message, _ = fetch(hub, "hf-hub:me/clip", tmp_path / "other")
    assert message.startswith("CheckpointError: hf-hub:me/clip: ") and "checksum" in message, (
        message
    )


def test_what_is_not_there_is_said(tmp_path: Path, hub: Hub):
    hub.files["me/other", "model.safetensors"] = b""
    for place, reason in (
        (
            "hf-hub:me/other",
            "me/other has neither open_clip_model.safetensors nor open_clip_pytorch_model.bin",
        ),
        ("hf-hub:me/nothing", "RepositoryNotFoundError"),
        (
            "hf-hub:laion/CLIP-ViT-B-32-laion2b-s34b-b79k",
            "did you mean hf-hub:laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
        ),
        # hf-hub: does not find its file, pytorch_model.bin; the tag names it
        ("hf-hub:jienengchen/ViTamin-L2-256", "did you mean open_clip:ViTamin-L2-256/datacomp1b"),
        ("hf-hub:me/clip@never", "RevisionNotFoundError"),
    ):
        _, said = fetch(hub, place, tmp_path / "home")
        assert f"CheckpointError: {place}: " in said and reason in said, said
    hub.files["me/bin", "open_clip_pytorch_model.bin"] = hub.files.pop(
        ("me/clip", SAFETENSORS)
    )  # without a description
    assert fetch(hub, "hf-hub:me/bin", tmp_path / "home")[0].endswith("open_clip_pytorch_model.bin")


def test_a_tag_may_name_a_file_of_its_repository(tmp_path: Path, hub: Hub):
    """By OpenCLIP's own table."""
    pytest.importorskip("open_clip", exc_type=ImportError)
    shard = ("jienengchen/ViTamin-S", "pytorch_model.bin")
    hub.files[shard] = hub.files["me/clip", SAFETENSORS]
    place, home = "open_clip:ViTamin-S/datacomp1b", tmp_path / "home"
    path, said = fetch(hub, place, home, script=f"import tests.peers.torchvision_shim\n{FETCH}")
    assert Path(path).name == "pytorch_model.bin" and Path(path).is_file(), said


def test_places_on_the_hub():
    assert resolve("hf-hub:laion/CLIP-x_y.1") == HubPlace("laion/CLIP-x_y.1")
    assert resolve("hf-hub:laion/CLIP@v1/2") == HubPlace("laion/CLIP", revision="v1/2")
    assert resolve("open_clip:ViT-B-32/laion2b_s34b_b79k") == HubPlace(
        "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
    )
    assert resolve("open_clip:ViTamin-S/datacomp1b") == HubPlace(
        "jienengchen/ViTamin-S", file="pytorch_model.bin"
    )
    with pytest.raises(UserError, match=r"Did you mean ViT-B-32/laion2b_s34b_b79k"):
        resolve("open_clip:ViT-B-32/laion2b_s34b_b79")
    with pytest.raises(UserError, match="write hf-hub:org/name"):
        resolve("hf-hub:laion")


def test_the_tables_tags_are_openclips():
    """Those of the installed one, and more if the table is of a newer one."""
    pytest.importorskip("open_clip", exc_type=ImportError)
    sys.path.insert(0, str(ROOT / "scripts"))
    from openclip_tags import FILE, table

    tags = json.loads(FILE.read_text())["tags"]
    assert len(table()) >= 196 and table().items() <= tags.items()
