"""clip_benchmark's data sets, as its exporter writes them: the commands of docs/evaluation.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import webdataset

from clip_train.data.config import DataConfig
from clip_train.data.loader import TrainLoader
from clip_train.data.tokenizer import Tokenizer
from clip_train.data.validation import ValLoader
from clip_train.evaluate.zero_shot import ZeroShotClasses
from launcher.cli.main import main
from tests.data.shards import counted, jpeg

CLASSES = ["cat", "barn owl", "red fox"]
TEMPLATES = ["a photo of a {c}.", "a drawing of the {c}."]


def export(folder: Path, split: str, samples: list[dict[str, Any]], per_shard: int) -> Path:
    """As clip_benchmark's `webdataset_builder.py` does."""
    (folder / split).mkdir(parents=True)
    with webdataset.ShardWriter(f"{folder}/{split}/%d.tar", maxcount=per_shard, verbose=0) as sink:
        for index, sample in enumerate(samples):
            sink.write({"__key__": f"s{index:07d}", **sample})
        shards = sink.shard
    (folder / split / "nshards.txt").write_text(f"{shards}\n")
    return folder


@pytest.fixture
def cars(tmp_path) -> Path:
    folder = tmp_path / "wds_cars"
    samples = [{"jpg": jpeg(i), "cls": i % 3} for i in range(25)]
    export(folder, "test", samples, per_shard=10)
    (folder / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    return folder


def captions_of(image: int) -> list[str]:
    return [f"caption {number} of image {image}" for number in range(2 + image % 3)]


@pytest.fixture
def captioned(tmp_path) -> Path:
    folder = tmp_path / "wds_captions"
    samples = [{"jpg": jpeg(i), "txt": "\n".join(captions_of(i))} for i in range(12)]
    return export(folder, "test", samples, per_shard=5)


def evaluated(capsys, *arguments: str) -> dict[str, Any]:
    status = main(["evaluate", *arguments, "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return json.loads(printed.out.splitlines()[-1])


def test_a_set_with_classes(cars, weights, capsys, tmp_path):
    """By its split's folder, by the folder of the set, by its shards; equal to a file of classes."""
    model = (str(weights), "model.name=tiny")
    (tmp_path / "classes.json").write_text(
        json.dumps(
            {"classnames": CLASSES, "templates": [t.replace("{c}", "{}") for t in TEMPLATES]}
        )
    )
    expected = evaluated(
        capsys,
        *model,
        f"evaluate.zero_shot_data={cars}/test/{{0..2}}.tar",
        f"evaluate.zero_shot_classes={tmp_path / 'classes.json'}",
    )
    assert expected["zero_shot_samples"] == 25
    for data in (f"{cars}/test", str(cars), f"{cars}/test/*.tar"):
        found = evaluated(
            capsys,
            *model,
            f"evaluate.zero_shot_data={data}",
            f"evaluate.zero_shot_classes={cars}",
        )
        assert found == expected


def test_the_classes_of_a_set(cars):
    (cars / "other.json").write_text(json.dumps({"classnames": ["a"]}))
    assert ZeroShotClasses.load(str(cars / "other.json")).classnames == ["a"]
    for place in (cars, cars / "test", cars / "classnames.txt"):
        classes = ZeroShotClasses.load(str(place))
        assert classes.classnames == CLASSES
        assert classes.prompts(1) == ["a photo of a barn owl.", "a drawing of the barn owl."]


def test_a_set_with_captions_has_one_in_each_line(captioned, weights, capsys):
    loader = ValLoader(
        counted(f"{captioned}/test/*.tar"), image_size=16, context_length=16, batch_size=5
    )
    found = [texts for batch in loader for texts in batch.captions]
    assert found == [captions_of(image) for image in range(12)]
    number = sum(map(len, found))
    assert number == 36
    for data in (f"{captioned}/test", f"{captioned}/test/{{0..2}}.tar"):
        scores = evaluated(capsys, str(weights), "model.name=tiny", f"data.val={data}")
        assert scores["num_samples"] == 12
        # recalls over captions are multiples of 1 / 36
        recall = scores["image_retrieval_recall@1"] * number
        assert recall == pytest.approx(round(recall))


def test_training_draws_one_of_the_lines(captioned):
    config = DataConfig(train=f"{captioned}/test", workers=0, lanes=1)
    seen: set[tuple[int, ...]] = set()
    sizes: dict[str, Any] = {"image_size": 8, "context_length": 16, "global_size": 12}
    with TrainLoader(config, **sizes, seed=0) as loader:
        for _ in range(8):
            seen |= {tuple(text) for text in next(loader).texts.tolist()}
    expected = {
        tuple(text) for image in range(12) for text in Tokenizer(16)(captions_of(image)).tolist()
    }
    assert len(seen) > 24 and seen <= expected


def test_a_text_of_other_shards_stays_one_caption(captioned):
    (captioned / "test" / "nshards.txt").rename(captioned / "nshards.txt")
    loader = ValLoader(
        counted(f"{captioned}/test/0.tar"), image_size=16, context_length=16, batch_size=5
    )
    (batch,) = loader
    assert [len(texts) for texts in batch.captions] == [1] * 5


def test_a_number_of_shards_that_is_none(captioned, weights, capsys):
    (captioned / "test" / "nshards.txt").write_text("many\n")
    status = main(["evaluate", str(weights), "model.name=tiny", f"data.val={captioned}/test"])
    assert status == 2
    assert "must hold the number of shards, and has 'many'" in capsys.readouterr().err
