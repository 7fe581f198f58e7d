"""Writes clip_train/models/openclip_tags.json: the hub's repository of each of OpenCLIP's pretrained tags.

    .venv-peers/bin/python scripts/openclip_tags.py

Run it with the newest OpenCLIP. The file names its version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FILE = ROOT / "clip_train" / "models" / "openclip_tags.json"

import tests.peers.torchvision_shim  # noqa: E402, F401, I001  before open_clip
import open_clip  # noqa: E402


def table() -> dict[str, str]:
    """MODEL/TAG -> repository, or repository and file. Tags that are not on the hub are left out."""
    repositories = {
        f"{model}/{tag}": open_clip.get_pretrained_cfg(model, tag).get("hf_hub", "").rstrip("/")
        for model, tag in open_clip.list_pretrained()
    }
    return {tag: repository for tag, repository in repositories.items() if repository}


if __name__ == "__main__":
    tags = table()
    content = {"open_clip": open_clip.__version__, "tags": dict(sorted(tags.items()))}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{FILE}: {len(tags)} tags of OpenCLIP {open_clip.__version__}")
