"""Against brute force in numpy; on several ranks against one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from clip_train import dist
from clip_train.errors import UserError
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.loop import evaluate
from clip_train.evaluate.nearest import Examples
from clip_train.evaluate.retrieval import ranks_of_matches
from clip_train.evaluate.zero_shot import ZeroShotClasses, count_hits
from clip_train.models.config import load_architecture
from tests.evaluate.fake import CLASSES, Batch, FakeEngine, batches, samples, tokenize
from tests.ranks import RankFailedError, run_ranks

NUM = 23


def _write_classes(folder: Path) -> str:
    path = folder / "classes.json"
    path.write_text(CLASSES.model_dump_json())
    return str(path)


def _expected_label(caption: str, metadata: dict[str, Any]) -> int | None:
    names = CLASSES.classnames
    if "cls" in metadata:
        return int(metadata["cls"])
    if "label" in metadata:
        return names.index(metadata["label"])
    if caption == "the sky":
        return 2
    for i, name in enumerate(names):
        if caption in (name, f"a photo of a {name}.", f"an old picture of {name}"):
            return i
    return None


def _brute_force(whole: Batch) -> dict[str, float]:
    engine: Any = FakeEngine()
    engine.train(False)
    with torch.no_grad():
        image = engine.encode_image(whole.images).double().numpy()
        text = engine.encode_text(whole.texts).double().numpy()
        rows = []
        for name in CLASSES.classnames:
            prompts = [f"a photo of a {name}.", name, f"an old picture of {name}"]
            mean = engine.encode_text(tokenize(prompts)).double().numpy().mean(0)
            rows.append(mean / np.linalg.norm(mean))
    guesses = np.argsort(-image @ np.stack(rows).T, axis=1)
    labels = [_expected_label(c, m) for c, m in zip(whole.captions, whole.metadata, strict=True)]
    labelled = [(g.tolist().index(label)) for g, label in zip(guesses, labels, strict=True) if label is not None]
    out = {
        "num_samples": float(len(image)),
        "zero_shot_samples": float(len(labelled)),
        "zero_shot_top1": float(np.mean([place < 1 for place in labelled])),
        "zero_shot_top5": float(np.mean([place < 5 for place in labelled])),
    }
    for name, scores in (("image_to_text", image @ text.T), ("text_to_image", text @ image.T)):
        places = []
        for i in range(len(image)):
            same = [j for j in range(len(image)) if whole.captions[j] == whole.captions[i]]
            others = [j for j in range(len(image)) if j not in same]
            best = max(scores[i, j] for j in same)
            places.append(1 + sum(scores[i, j] >= best for j in others))
        for k in (1, 5, 10):
            out[f"{name}_R@{k}"] = float(np.mean([p <= k for p in places]))
        out[f"{name}_median_rank"] = float(np.median(places))
    return out


@pytest.mark.parametrize("size", [1, 4, 100])
def test_equals_brute_force(tmp_path: Path, size: int):
    whole = samples(NUM)
    engine: Any = FakeEngine()
    config = EvaluateConfig(zero_shot_classes=_write_classes(tmp_path), batch_size=size)
    result = evaluate(engine, batches(whole, 0, NUM, size), config, tokenize)
    expected = _brute_force(whole)
    assert 0 < expected["zero_shot_top1"] < expected["zero_shot_top5"] < 1
    assert len(set(whole.captions)) < NUM
    assert result == pytest.approx(expected, abs=1e-12)
    assert engine.training


def _on_rank(ends: tuple[int, ...], classes: str | None) -> tuple[dict[str, float], list[str]]:
    engine: Any = FakeEngine()
    start = (0, *ends)[dist.rank()]
    mine = batches(samples(NUM), start, ends[dist.rank()], 3)
    config = EvaluateConfig(zero_shot_classes=classes, batch_size=4)
    return evaluate(engine, mine, config, tokenize), engine.calls


@pytest.mark.distributed
@pytest.mark.parametrize("ends", [(17, NUM), (NUM, NUM), (0, NUM)])
def test_ranks_with_uneven_parts_agree_with_one(tmp_path: Path, ends: tuple[int, ...]):
    expected = _brute_force(samples(NUM))
    (first, first_calls), (second, second_calls) = run_ranks(_on_rank, 2, ends, _write_classes(tmp_path))
    assert first == second == pytest.approx(expected, abs=1e-12)
    assert first_calls == second_calls  # or ZeRO-3 would hang


def _bad_label_on_one_rank(classes: str) -> None:
    whole = samples(8)
    if dist.rank() == 1:
        whole.metadata[5] = {"cls": 99}
    evaluate(cast(Any, FakeEngine()), batches(whole, 0, 8, 3), EvaluateConfig(zero_shot_classes=classes), tokenize)


@pytest.mark.distributed
def test_a_bad_label_on_one_rank_ends_all(tmp_path: Path):
    with pytest.raises(RankFailedError) as e:
        run_ranks(_bad_label_on_one_rank, 2, _write_classes(tmp_path))
    assert e.value.errors[1][0] == "UserError"
    assert "a sample's cls is 99, none of the 7 classes" in e.value.errors[1][1]
    assert e.value.errors[0][0] == "RemoteRankError"


def test_nothing_to_evaluate_is_an_error(tmp_path: Path):
    engine: Any = FakeEngine()
    with pytest.raises(UserError, match=r"data\.val holds no samples"):
        evaluate(engine, [], EvaluateConfig(), tokenize)
    assert engine.training
    whole = samples(2)
    unlabelled = Batch(whole.images, whole.texts, ["x", "y"], [{}, {}])
    with pytest.raises(UserError, match="none of 2 validation samples has a label"):
        evaluate(engine, [unlabelled], EvaluateConfig(zero_shot_classes=_write_classes(tmp_path)), tokenize)


def test_only_what_is_asked_for_is_computed():
    engine: Any = FakeEngine()
    config = EvaluateConfig(retrieval=False)
    assert evaluate(engine, batches(samples(5), 0, 5, 2), config, tokenize) == {"num_samples": 5.0}
    assert engine.calls == ["image"] * 3


def test_ties_and_nans_are_never_found():
    same = torch.ones(6, 4) / 2
    groups = torch.arange(6)
    assert ranks_of_matches(same, same, groups, groups).tolist() == [6] * 6
    assert ranks_of_matches(same * torch.nan, same, groups, groups).tolist() == [6] * 6
    assert count_hits(same, groups, same) == (6, 0, 0)
    assert count_hits(same * torch.nan, groups, same) == (6, 0, 0)
    one = torch.zeros(6, dtype=torch.int64)  # but one caption for all is right everywhere
    assert ranks_of_matches(same, same, one, one).tolist() == [1] * 6


def test_blocks_change_nothing():
    torch.manual_seed(0)
    queries, candidates = torch.randn(37, 8, dtype=torch.float64), torch.randn(50, 8, dtype=torch.float64)
    groups = torch.randint(0, 20, (50,))
    whole = ranks_of_matches(queries, candidates, groups[:37], groups)
    assert torch.equal(whole, ranks_of_matches(queries, candidates, groups[:37], groups, block_elements=120))
    assert len(ranks_of_matches(queries[:0], candidates, groups[:0], groups)) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"classnames": []}, "classnames List should have at least 1 item"),
        ({"classnames": ["a"], "templates": ["a photo"]}, "'a photo' has not"),
        ({"classnames": ["a", "b", "a"]}, "repeated: a"),
        ({"classnames": ["a"], "captions": {"x": "b"}}, r"captions\['x'\] is 'b', none of the 1 classes"),
        ({"classnames": ["a"], "names": []}, "names Extra inputs are not permitted"),
    ],
)
def test_mistakes_in_the_classes_are_explained(tmp_path: Path, content: dict[str, Any], message: str):
    path = tmp_path / "classes.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        ZeroShotClasses.load(str(path))
    with pytest.raises(UserError, match="does not exist"):
        ZeroShotClasses.load(str(tmp_path / "none.json"))


def test_runs_on_the_model():
    """The plain engine and the real model; a label for each caption, as in the demo."""
    from clip_train.engine import PlainEngine
    from clip_train.models.clip import CLIP

    torch.manual_seed(0)
    engine = PlainEngine(CLIP(load_architecture("tiny"), patch_dropout=0.5))
    engine.train()
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    texts = torch.randint(1, 400, (6, 16))
    batch = Batch(images, texts, list("abcdef"), [{}] * 6)
    result = evaluate(engine, [batch], EvaluateConfig(), tokenize)
    assert result["num_samples"] == 6
    assert result["image_to_text_R@10"] == 1
    assert engine.model.training


def test_the_captions_nearest_to_some_images():
    """Against a sort in plain Python; of captions that come twice one is shown."""
    whole = samples(NUM)
    engine: Any = FakeEngine()
    examples = Examples(cast(Any, batches(whole, 0, NUM, 16)))
    evaluate(engine, cast(Any, examples), EvaluateConfig(), tokenize, examples.take)
    engine.train(False)
    with torch.no_grad():
        text, image = engine.encode_text(whole.texts).double(), engine.encode_image(whole.images).double()
    found = examples.nearest()
    assert len(found) == 8
    for row, each in zip(range(0, 16, 2), found, strict=True):
        cosines = {caption: float(image[row] @ text[i]) for i, caption in enumerate(whole.captions)}
        best = sorted(cosines, key=cosines.__getitem__, reverse=True)[:3]
        assert each["caption"] == whole.captions[row]
        assert [caption for caption, _ in each["nearest"]] == best
        assert [cosine for _, cosine in each["nearest"]] == pytest.approx([cosines[name] for name in best], abs=1e-5)
        assert each["picture"].startswith("data:image/jpeg;base64,")


def test_without_texts_there_is_no_nearest_caption(tmp_path: Path):
    engine: Any = FakeEngine()
    examples = Examples(cast(Any, batches(samples(5), 0, 5, 2)))
    evaluate(engine, cast(Any, examples), EvaluateConfig(retrieval=False), tokenize, examples.take)
    examples.write(tmp_path)
    assert (tmp_path / "nearest.json").read_text() == '{"examples": []}'
