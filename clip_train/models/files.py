"""Names of the files that hold weights and their descriptions."""

import hashlib
import json
from pathlib import Path
from typing import Any

WEIGHTS_NAMES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)  # the first is what an export writes
# The files of a folder that can be weights, the first that exists is read.
FOLDER_NAMES = (*WEIGHTS_NAMES, "model.safetensors", "pytorch_model.bin")
CONFIG_NAME = "open_clip_config.json"
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")  # the latter of version 5
TRANSFORMERS_CONFIGS = ("config.json", *PREPROCESSORS)
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json",
    "spiece.model", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        for data in iter(lambda: f.read(1 << 22), b""):
            digest.update(data)
    return digest.hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file. OSError, ValueError."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    return content if isinstance(content, dict) else {}
