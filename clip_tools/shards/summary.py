"""What `clip-train shards` prints about its samples: repeats and labels."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = "classes.json"
MOST = 7  # templates, as in evaluate.templates=simple
TEMPLATE = "a photo of a {}."


def describe_repeats(digests: np.ndarray, images: Iterator[Any]) -> None:
    """Print how many rows have the image and captions of an earlier one, and an example.

    Args:
        digests: uint64 [rows], 0 for a row that is left out.
        images: of the same rows; read up to the example, if there is one.
    """
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    repeats = order[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)]
    if not repeats.size:
        return
    again = int(repeats.min())
    first = int(np.flatnonzero(digests == digests[again])[0])
    names = []
    for number, image in enumerate(itertools.islice(images, again + 1)):
        if number in (first, again):
            place = f" ({image})" if isinstance(image, str) else ""
            names.append(f"{number:09d}{place}")
    print(
        f"{repeats.size:,} rows are identical to an earlier one, such as {names[1]} to "
        f"{names[0]}: they would be negatives of each other; remove them from SOURCE, or "
        "train with loss.groups=caption"
    )


def describe_labels(
    key: str, labels: Counter[str], found: Counter[str], folder: Path, *, named: bool
) -> None:
    """Print the settings that evaluation needs for the labels; write names to the file of classes,
    with the found templates that are frequent.
    """
    missing = labels.pop("", 0)
    if missing:
        print(f"{missing:,} samples have no label in {key}: they are trained on, and not scored")
    if labels and not named:
        print(
            f"labels: numbers from {min(map(int, labels))} to {max(map(int, labels))} as .cls; "
            "evaluate.zero_shot_classes needs the names in this order: docs/evaluation.md"
        )
    elif labels:
        file = folder / CLASSES
        if not file.exists():
            fewest = max(2, labels.total() / 100)
            templates = [text for text, n in found.most_common(MOST) if n >= fewest] or [TEMPLATE]
            classes = {"classnames": sorted(labels), "templates": templates, "label_key": key}
            file.write_text(json.dumps(classes, indent=1, ensure_ascii=False), encoding="utf-8")
            print(
                f"templates: {len(templates)}, such as {templates[0]!r}; edit them in {file} if "
                "your captions differ"
            )
        print(f"labels: {len(labels):,} names in {key}; evaluate.zero_shot_classes={file}")
