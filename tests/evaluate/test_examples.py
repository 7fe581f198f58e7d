"""The first validation images and the captions that a model ranks first for them, against loops in numpy."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clip_train import dist
from clip_train.data.validation import ValBatch
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.examples import Examples
from clip_train.evaluate.loop import evaluate
from clip_train.metrics.skipped import Skipped
from tests.evaluate.fake import FakeEngine, samples, tokenize
from tests.ranks import run_ranks

NUM = 23


def val_batches(start: int, end: int, size: int) -> list[ValBatch]:
    whole = samples(NUM)
    return [
        ValBatch(
            whole.images[i : min(i + size, end)],
            tokenize([text for each in whole.captions[i : min(i + size, end)] for text in each]),
            whole.captions[i : min(i + size, end)],
            [f"key-{each}" for each in range(i, min(i + size, end))],
            whole.metadata[i : min(i + size, end)],
        )
        for i in range(start, end, size)
    ]


def best_by_hand(image: int) -> list[tuple[str, float]]:
    """The three captions with the largest cosines; equal captions are one."""
    whole, engine = samples(NUM), FakeEngine()
    engine.train(False)
    with torch.no_grad():
        pixels = engine.encode("image", whole.images).double().numpy()[image]
        cosines = {}
        for text in {text for captions in whole.captions for text in captions}:
            feature = engine.encode("text", tokenize([text])).double().numpy()[0]
            cosines[text] = float(np.dot(pixels, feature))
    return sorted(cosines.items(), key=lambda item: -item[1])[:3]


def run_evaluation(folder: Path, ends: tuple[int, ...], step: int, config: EvaluateConfig) -> dict:
    start = (0, *ends)[dist.rank()]
    examples = Examples(folder, step - 1, Skipped())
    engine: Any = FakeEngine()
    mine = val_batches(start, ends[dist.rank()], 4)
    found = evaluate(engine, mine, config, tokenize, examples=examples)
    examples.after_evaluate({"step": step, **found})
    without = evaluate(engine, mine, config, tokenize)
    assert found == without
    return found


def on_rank(folder: str, ends: tuple[int, ...]) -> dict:
    return run_evaluation(Path(folder), ends, 5, EvaluateConfig())


def check(folder: Path) -> None:
    (record,) = map(json.loads, (folder / "examples.jsonl").read_text().splitlines())
    assert record["step"] == 5 and len(record["images"]) == 6
    whole = samples(NUM)
    some_are_own = []
    for i, image in enumerate(record["images"]):
        assert image["key"] == f"key-{i}" and image["captions"] == whole.captions[i]
        expected = best_by_hand(i)
        assert [each["caption"] for each in image["ranked"]] == [text for text, _ in expected]
        for each, (text, cosine) in zip(image["ranked"], expected, strict=True):
            assert each["cosine"] == pytest.approx(cosine, abs=1e-5)
            assert each["own"] == (text in whole.captions[i])
            some_are_own.append(each["own"])
        jpeg = Image.open(io.BytesIO((folder / "examples" / f"{i}.jpg").read_bytes()))
        drawn = np.asarray(jpeg, dtype=float).mean()
        assert drawn == pytest.approx(whole.images[i].double().mean().item(), abs=12)
    assert any(some_are_own) and not all(some_are_own)


def test_one_rank_records_what_loops_find(tmp_path: Path):
    run_evaluation(tmp_path, (NUM,), 5, EvaluateConfig())
    check(tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("ends", [(17, NUM), (2, NUM), (0, NUM), (NUM, NUM)])
def test_two_ranks_record_the_same(tmp_path: Path, ends: tuple[int, ...]):
    """The first images may be on another rank, and captions are on any."""
    run_ranks(on_rank, 2, str(tmp_path), ends)
    check(tmp_path)


def test_resume_forgets_evaluations_after_its_checkpoint(tmp_path: Path):
    for step in (2, 4, 6):
        run_evaluation(tmp_path, (NUM,), step, EvaluateConfig())
    Examples(tmp_path, 4, Skipped())
    lines = (tmp_path / "examples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4]


def test_nothing_is_recorded_without_texts(tmp_path: Path):
    run_evaluation(tmp_path, (NUM,), 5, EvaluateConfig(retrieval=False, val_loss=False))
    assert not (tmp_path / "examples").exists()
    assert not (tmp_path / "examples.jsonl").exists()


def test_long_captions_and_features_that_are_not_numbers(tmp_path: Path):
    whole = samples(2)
    texts = ["long " * 500, "broken \ud800"]
    batch = ValBatch(
        whole.images[:2], tokenize(["a", "b"]), [[text] for text in texts], ["x", "y"], [{}, {}]
    )

    class Broken(FakeEngine):
        def encode(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
            return super().encode(name, inputs) * float("nan")

    examples = Examples(tmp_path, 0, Skipped())
    evaluate(Broken(), [batch], EvaluateConfig(), tokenize, examples=examples)  # type: ignore[arg-type]
    examples.after_evaluate({"step": 1})
    (record,) = map(json.loads, (tmp_path / "examples.jsonl").read_text().splitlines())
    ranked = record["images"][0]["ranked"]
    assert {each["cosine"] for each in ranked} == {None}
    assert max(len(each["caption"]) for each in ranked) == 300


def test_a_full_disk_is_a_warning(tmp_path: Path):
    skipped = Skipped()
    examples = Examples(tmp_path, 0, skipped)
    (tmp_path / "examples").write_text("a file in place of the folder")
    evaluate(FakeEngine(), val_batches(0, NUM, 4), EvaluateConfig(), tokenize, examples=examples)  # type: ignore[arg-type]
    examples.after_evaluate({"step": 1})
    assert [line.split(" after")[0] for line in skipped.lines()] == ["examples.jsonl"]
