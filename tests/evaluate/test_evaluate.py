"""Against brute force in numpy; on several ranks against one."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from clip_train import dist
from clip_train.errors import EvaluationStopped, UserError
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.loop import evaluate
from clip_train.evaluate.retrieval import MatchRule, ranks_of_matches
from clip_train.evaluate.zero_shot import ZeroShotClasses
from clip_train.models.config import load_architecture
from tests.evaluate.fake import CLASSES, LOGIT_SCALE, Batch, FakeEngine, batches, samples, tokenize
from tests.ranks import RankFailedError, run_ranks

NUM = 23


def _expected_label(caption: str, metadata: dict[str, Any]) -> int | None:
    names = CLASSES.classnames
    if "cls" in metadata:
        return int(metadata["cls"])
    if "label" in metadata:
        return names.index(metadata["label"])
    for i, name in enumerate(names):
        if caption in (name, f"a photo of a {name}.", f"an old picture of {name}"):
            return i
    return None


def _brute_force(whole: Batch, batch_size: int = 4) -> dict[str, float]:
    """Loops over numpy. Ties: of the rule that merges captions the worst place, of the others a stable sort's."""
    engine: Any = FakeEngine()
    engine.train(False)
    with torch.no_grad():
        image = engine.encode("image", whole.images).double().numpy()
        text = engine.encode("text", whole.texts).numpy().astype(np.float64)
        rows = []
        for name in CLASSES.classnames:
            prompts = [f"a photo of a {name}.", name, f"an old picture of {name}"]
            mean = engine.encode("text", tokenize(prompts)).double().numpy().mean(0)
            rows.append(mean / np.linalg.norm(mean))
    guesses = np.argsort(-image @ np.stack(rows).T, axis=1)
    labels = [_expected_label(c[0], m) for c, m in zip(whole.captions, whole.metadata, strict=True)]
    labelled = [
        (g.tolist().index(label))
        for g, label in zip(guesses, labels, strict=True)
        if label is not None
    ]
    recalls: dict[int, list[bool]] = {}
    for place, label in zip(labelled, filter(lambda x: x is not None, labels), strict=True):
        recalls.setdefault(label, []).append(place < 1)
    out = {
        "num_samples": float(len(image)),
        "zero_shot_mean_per_class_recall": float(np.mean([np.mean(x) for x in recalls.values()])),
        "zero_shot_samples": float(len(labelled)),
        "zero_shot_top1": float(np.mean([place < 1 for place in labelled])),
        "zero_shot_top5": float(np.mean([place < 5 for place in labelled])),
    }
    owner = np.array([i for i, each in enumerate(whole.captions) for _ in each])
    first = np.array([np.flatnonzero(owner == i)[0] for i in range(len(image))])
    words = [each[0] for each in whole.captions]
    for name, scores in (
        ("image_to_text", image @ text[first].T),
        ("text_to_image", text[first] @ image.T),
    ):
        order = np.argsort(-scores, axis=1, kind="stable")
        places = [order[i].tolist().index(i) + 1 for i in range(len(image))]
        out[f"{name}_mean_rank"], out[f"{name}_median_rank"] = (
            float(np.mean(places)),
            np.floor(np.median(places)),
        )
        out |= {f"{name}_R@{k}": float(np.mean([p <= k for p in places])) for k in (1, 5, 10)}
        places = []
        for i in range(len(image)):
            same = [j for j in range(len(image)) if words[j] == words[i]]
            others = [j for j in range(len(image)) if j not in same]
            best = max(scores[i, j] for j in same)
            places.append(1 + sum(scores[i, j] >= best for j in others))
        out |= {f"dedup_{name}_R@{k}": float(np.mean([p <= k for p in places])) for k in (1, 5, 10)}
    for k in (1, 5, 10):
        top = np.argsort(-image @ text.T, axis=1, kind="stable")[:, :k]
        out[f"text_retrieval_recall@{k}"] = float(
            np.mean([(owner[top[i]] == i).any() for i in range(len(image))])
        )
        top = np.argsort(-text @ image.T, axis=1, kind="stable")[:, :k]
        out[f"image_retrieval_recall@{k}"] = float(
            np.mean([owner[j] in top[j] for j in range(len(text))])
        )
    losses = []
    for start in range(0, len(image), batch_size):
        stop = min(start + batch_size, len(image))
        logits = LOGIT_SCALE * image[start:stop] @ text[first[start:stop]].T
        for each in (logits, logits.T):
            losses += (np.log(np.exp(each).sum(1)) - each.diagonal()).tolist()
    out["val_loss"] = float(np.mean(losses))
    return out


@pytest.mark.parametrize("size", [1, 4, 100])
def test_equals_brute_force(size: int):
    whole = samples(NUM)
    engine: Any = FakeEngine()
    config = EvaluateConfig(batch_size=size)
    result = evaluate(engine, batches(whole, 0, NUM, size), config, tokenize, CLASSES)
    expected = _brute_force(whole, size)
    assert 0 < expected["zero_shot_top1"] < expected["zero_shot_top5"] < 1
    assert len({each[0] for each in whole.captions}) < NUM
    assert result == pytest.approx(expected, abs=1e-6)
    assert engine.training


def _on_rank(ends: tuple[int, ...]) -> tuple[dict[str, float], list[str]]:
    engine: Any = FakeEngine()
    start = (0, *ends)[dist.rank()]
    mine = batches(samples(NUM), start, ends[dist.rank()], 3)
    return evaluate(engine, mine, EvaluateConfig(batch_size=4), tokenize, CLASSES), engine.calls


def _stopped_on_rank_1() -> list[str]:
    """The calls of the engine until rank 1, which was asked to stop after its first batch, leaves."""
    engine: Any = FakeEngine()
    asked = iter([False, dist.rank() == 1])
    with pytest.raises(EvaluationStopped):
        evaluate(
            engine,
            batches(samples(NUM), 0, NUM, 3),
            EvaluateConfig(),
            tokenize,
            asked_to_stop=lambda: next(asked),
        )
    assert engine.training
    return engine.calls


@pytest.mark.distributed
def test_all_ranks_leave_between_the_same_two_batches():
    calls = run_ranks(_stopped_on_rank_1, 2)
    assert calls[0] == calls[1] and calls[0].count("image") == 1


@pytest.mark.distributed
@pytest.mark.parametrize("ends", [(17, NUM), (NUM, NUM), (0, NUM)])
def test_ranks_with_uneven_parts_agree_with_one(ends: tuple[int, ...]):
    expected = _brute_force(samples(NUM))
    (first, first_calls), (second, second_calls) = run_ranks(_on_rank, 2, ends)
    assert first == second == pytest.approx(expected, abs=1e-6)
    assert first_calls == second_calls  # or ZeRO-3 would hang


def _bad_label_on_one_rank() -> None:
    whole = samples(8)
    if dist.rank() == 1:
        whole.metadata[5] = {"cls": 99}
    evaluate(
        cast(Any, FakeEngine()),
        batches(whole, 0, 8, 3),
        EvaluateConfig(),
        tokenize,
        CLASSES,
    )


@pytest.mark.distributed
def test_a_bad_label_on_one_rank_ends_all():
    with pytest.raises(RankFailedError) as e:
        run_ranks(_bad_label_on_one_rank, 2)
    assert e.value.errors[1][0] == "UserError"
    assert "a sample's cls is 99, none of the 7 classes" in e.value.errors[1][1]
    assert e.value.errors[0][0] == "RemoteRankError"


def _out_of_memory_on_one_rank(place: str, name: str) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    if dist.rank() == 1:
        setattr(importlib.import_module(place), name, fail)
    mine = batches(samples(8), 0, 8, 3)
    evaluate(cast(Any, FakeEngine()), mine, EvaluateConfig(), tokenize, CLASSES)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "place, name",
    [
        ("torch", "cat"),
        ("clip_train.evaluate.features", "reserve"),
        ("clip_train.evaluate.retrieval", "ranks_of_matches"),
        ("clip_train.evaluate.zero_shot", "ranks_of_matches"),
    ],
)
def test_one_rank_without_memory_ends_the_evaluation_of_all(place: str, name: str):
    """Not the run: the trainer skips an evaluation whose error all ranks have agreed on."""
    with pytest.raises(RankFailedError) as e:
        run_ranks(_out_of_memory_on_one_rank, 2, place, name)
    assert [e.value.errors[rank][0] for rank in (0, 1)] == ["RemoteRankError", "OutOfMemoryError"]


def test_nothing_to_evaluate_is_an_error():
    engine: Any = FakeEngine()
    with pytest.raises(UserError, match="has no samples"):
        evaluate(engine, [], EvaluateConfig(), tokenize)
    assert engine.training
    whole = samples(2)
    unlabelled = Batch(whole.images, whole.texts, [["x"], ["y", "z"]], [{}, {}])
    with pytest.raises(UserError, match="none of 2 validation samples has a label"):
        evaluate(engine, [unlabelled], EvaluateConfig(), tokenize, CLASSES)


class Cut(FakeEngine):
    """Its features have 2 values."""

    def encode(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(super().encode(name, inputs)[:, :2], dim=1)


def test_narrow_features_are_measured_as_those_of_a_narrow_model():
    whole, engine, cut = samples(NUM), cast(Any, FakeEngine()), cast(Any, Cut())
    config = EvaluateConfig(batch_size=4)
    both = evaluate(engine, batches(whole, 0, NUM, 4), config, tokenize, CLASSES, widths=[2])
    alone = evaluate(engine, batches(whole, 0, NUM, 4), config, tokenize, CLASSES)
    narrow = evaluate(cut, batches(whole, 0, NUM, 4), config, tokenize, CLASSES)
    assert narrow.pop("num_samples") == NUM
    assert narrow["zero_shot_top1"] != alone["zero_shot_top1"]
    assert both == {**alone, **{f"width_2/{name}": pytest.approx(x) for name, x in narrow.items()}}
    assert engine.calls.count("image") == 2 * cut.calls.count("image")  # encoded once


def test_only_what_is_asked_for_is_computed():
    engine: Any = FakeEngine()
    config = EvaluateConfig(retrieval=False, val_loss=False)
    assert evaluate(engine, batches(samples(5), 0, 5, 2), config, tokenize) == {"num_samples": 5.0}
    assert engine.calls == ["image"] * 3


def test_labelled_images_need_no_captions():
    whole = samples(NUM)
    labelled = Batch(
        whole.images,
        whole.texts[:0],
        [[] for _ in range(NUM)],
        [{"cls": str(i % 5)} for i in range(NUM)],  # two of the classes have no image
    )
    engine: Any = FakeEngine()
    config = EvaluateConfig(batch_size=4)
    scores = evaluate(engine, [labelled], config, tokenize, CLASSES, captions=False)
    expected = _brute_force(replace(whole, metadata=labelled.metadata))
    assert scores == {name: expected[name] for name in scores}
    assert {name.removeprefix("zero_shot_") for name in scores} == {
        "top1", "top5", "mean_per_class_recall", "samples",
    }  # fmt: skip


def _stopped_at_the_prompts() -> list[str]:
    """The calls of the engine until rank 1 is asked to stop before its second batch of prompts."""
    engine: Any = FakeEngine()

    def asked() -> bool:
        return dist.rank() == 1 and engine.calls.count("text") == 1

    with pytest.raises(EvaluationStopped):
        evaluate(
            engine,
            batches(samples(NUM), 0, NUM, 3),
            EvaluateConfig(batch_size=4, retrieval=False, val_loss=False),
            tokenize,
            CLASSES,
            asked_to_stop=asked,
        )
    return engine.calls


@pytest.mark.distributed
def test_all_ranks_leave_between_the_same_two_batches_of_prompts():
    calls = run_ranks(_stopped_at_the_prompts, 2)
    assert calls[0] == calls[1] and calls[0].count("text") == 1


def test_imagenets_classes_and_templates_by_name(tmp_path: Path):
    """Names that two classes share label nothing, numbers do."""
    imagenet = ZeroShotClasses.load("imagenet")
    assert (len(imagenet.classnames), len(imagenet.templates)) == (1000, 80)
    assert (imagenet.classnames[1], imagenet.classnames[-1]) == ("goldfish", "toilet paper")
    assert imagenet.prompts(1)[0] == "a bad photo of a goldfish."
    own = {
        "classnames": ["goldfish", "sunglasses", "sunglasses"],
        "templates": ["a {}.", "many {}"],
    }
    (tmp_path / "classes.json").write_text(json.dumps(own))
    theirs = ZeroShotClasses.load(str(tmp_path / "classes.json"))
    assert theirs.prompts(2) == ["a sunglasses.", "many sunglasses"]
    simple = ZeroShotClasses.load(str(tmp_path / "classes.json"), "simple")
    assert simple.prompts(0)[0] == "itap of a goldfish."
    label = theirs.labeller()
    assert [label("many goldfish", {}), label("many sunglasses", {}), label("", {"cls": "2"})] == [
        0,
        -1,
        2,
    ]
    with pytest.raises(ValueError, match="'sunglasses', the name of 2 of the 3 classes"):
        label("", {"label": "sunglasses"})


@pytest.mark.parametrize(
    ("metadata", "index"),
    [
        ({"label": "owl"}, 0),
        ({"label": ["owl"]}, 0),
        ({"label": 1}, 1),
        ({"label": "1"}, 1),
        ({"label": "911"}, 2),
        ({"label": ["911"]}, 2),
        ({"label": "2", "cls": "0"}, 0),
        ({"cls": ["1"]}, 1),
        ({"cls": "fox"}, 1),
        ({}, -1),
    ],
)
def test_a_label_is_a_name_or_a_number_alone_or_in_a_list(metadata: dict[str, Any], index: int):
    label = ZeroShotClasses(classnames=["owl", "fox", "911"]).labeller()
    assert label("a caption", metadata) == index


@pytest.mark.parametrize("wrong", ["cat", "3", 3, -1, ["owl", "fox"], 1.5])
def test_a_label_of_no_class_is_named(wrong: Any):
    label = ZeroShotClasses(classnames=["owl", "fox", "911"]).labeller()
    with pytest.raises(ValueError, match=r"a sample's label is .*, none of the 3 classes"):
        label("a caption", {"label": wrong})


def test_ties_and_nans():
    """Of the rule with ties ahead a collapsed model finds nothing; else it is as a stable sort has it."""
    same = torch.ones(6, 4) / 2
    groups = torch.arange(6)
    one = torch.zeros(6, dtype=torch.int64)  # one caption for all: right everywhere
    rules = [
        MatchRule(groups, groups, ties_ahead=True),
        MatchRule(groups, groups),
        MatchRule(one, one, ties_ahead=True),
    ]
    assert [x.tolist() for x in ranks_of_matches(same, same, rules)] == [
        [6] * 6,
        [1, 2, 3, 4, 5, 6],
        [1] * 6,
    ]
    assert [x.tolist() for x in ranks_of_matches(same * torch.nan, same, rules[:2])] == [
        [6] * 6,
        [6] * 6,
    ]


def test_blocks_change_nothing():
    torch.manual_seed(0)
    queries, candidates = (
        torch.randn(37, 8, dtype=torch.float64),
        torch.randn(50, 8, dtype=torch.float64),
    )
    groups = torch.randint(0, 20, (50,))
    rules = [
        MatchRule(groups[:37], groups),
        MatchRule(groups[:37], groups.where(groups > 2, -1), ties_ahead=True),
    ]
    whole = ranks_of_matches(queries, candidates, rules)
    blocks = ranks_of_matches(queries, candidates, rules, block_elements=120)
    assert all(torch.equal(a, b) for a, b in zip(whole, blocks, strict=True)) and not torch.equal(
        *whole
    )
    assert len(ranks_of_matches(queries[:0], candidates, [MatchRule(groups[:0], groups)])[0]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"classnames": []}, "classnames must have at least one entry; such as"),
        ({"classnames": ["a"], "templates": ["a photo"]}, "'a photo' has not"),
        (
            {"classnames": ["a"], "captions": {}},
            "captions is not a key of this file; its keys are classnames, ",
        ),
        ({"names": ["a"]}, "classnames is missing; names is not a key of this file; its keys are"),
        (["a", "b"], r"the file must hold an object \({...}\), found list; such as {\"class"),
        ({"classnames": "owl"}, "classnames must be a list, found str; such as"),
        ({"classnames": ["owl", 3]}, "classnames.1 must be text, found int; such as"),
    ],
)
def test_mistakes_in_the_classes_are_explained(tmp_path: Path, content: Any, message: str):
    path = tmp_path / "classes.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        ZeroShotClasses.load(str(path))
    with pytest.raises(UserError, match="does not exist"):
        ZeroShotClasses.load(str(tmp_path / "none.json"))


def test_runs_on_the_model():
    """The plain engine and the real model; a label for each caption, as in the demo."""
    from clip_train.engines.base import PlainEngine
    from clip_train.models.clip import CLIP

    torch.manual_seed(0)
    engine = PlainEngine(CLIP(load_architecture("tiny"), patch_dropout=0.5))
    engine.train()
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    texts = torch.randint(1, 400, (6, 16))
    batch = Batch(images, texts, [[letter] for letter in "abcdef"], [{}] * 6)
    result = evaluate(engine, [batch], EvaluateConfig(), tokenize)
    assert result["num_samples"] == 6 and 0 < result["val_loss"] < 10
    assert result["image_to_text_R@10"] == 1
    assert engine.model.training
