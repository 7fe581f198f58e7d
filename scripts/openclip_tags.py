"""Writes clip_train/models/openclip_tags.json: the hub's repository of each of OpenCLIP's pretrained tags.

    .venv-peers/bin/python scripts/openclip_tags.py

Of models that are OpenCLIP's own (no tower of timm or of transformers, no decoder) and that lie on the hub.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import open_clip  # noqa: E402

import tests.peers.torchvision_shim  # noqa: E402, F401  before open_clip


def table() -> dict[str, str]:
    """MODEL/TAG -> repository, or repository and file."""
    found = {}
    for model, tag in open_clip.list_pretrained():
        config = open_clip.get_model_config(model)
        towers = config["vision_cfg"], config["text_cfg"]
        foreign = {
            key for tower in towers for key in tower if key in ("timm_model_name", "hf_model_name")
        }
        place = open_clip.get_pretrained_cfg(model, tag).get("hf_hub", "").rstrip("/")
        if place and not foreign and "multimodal_cfg" not in config:
            found[f"{model}/{tag}"] = place
    return found


if __name__ == "__main__":
    file = ROOT / "clip_train" / "models" / "openclip_tags.json"
    file.write_text(json.dumps(table(), indent=1, sort_keys=True) + "\n")
    print(f"{file}: {len(table())} tags of OpenCLIP {open_clip.__version__}")
