"""clip_benchmark's command line, without captioning: `python -m tests.peers.clip_benchmark_cli eval ...`."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np

import tests.peers.torchvision_shim  # noqa: F401  before open_clip


def as_float(array: Any) -> float:
    """As `float`, which it calls on arrays of one number: numpy 2.4 refuses that."""
    return float(array.item() if isinstance(array, np.ndarray) else array)


def without_captioning() -> None:
    """Captioning needs Java and packages that are not installed here."""
    for name, kind in (
        ("tokenizer.ptbtokenizer", "PTBTokenizer"), ("bleu.bleu", "Bleu"), ("meteor.meteor", "Meteor"),
        ("rouge.rouge", "Rouge"), ("cider.cider", "Cider"), ("spice.spice", "Spice"),
    ):  # fmt: skip
        module = types.ModuleType(f"pycocoevalcap.{name}")
        setattr(module, kind, object)
        sys.modules[module.__name__] = module
        parent = f"pycocoevalcap.{name.partition('.')[0]}"
        sys.modules.setdefault(parent, types.ModuleType(parent))
    sys.modules.setdefault("pycocoevalcap", types.ModuleType("pycocoevalcap"))


if __name__ == "__main__":
    without_captioning()
    from clip_benchmark.cli import main
    from clip_benchmark.metrics import zeroshot_classification

    zeroshot_classification.float = as_float  # type: ignore[attr-defined]
    sys.exit(main())
