"""`evaluate.sets`: each set has the numbers that it has alone, and the means are over the sets of a kind."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from clip_tools.probes import with_probes
from clip_train.errors import RankError, UserError
from clip_train.evaluate.data_sets import EvaluationSet
from clip_train.evaluate.features import Encoded
from clip_train.recipe.recipe import load_config
from launcher.cli.main import main
from launcher.slurm.submit import frozen_recipe
from tests.data.shards import jpeg
from tests.launcher.conftest import run
from tests.launcher.test_benchmark_sets import CLASSES, TEMPLATES, evaluated, export

COLORS = {"dark red": (150, 0, 0), "green": (0, 200, 0), "sky blue": (100, 100, 255)}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Two sets with labels and two with captions, of every layout."""
    root = tmp_path_factory.mktemp("places")
    cars = root / "wds_cars"
    export(cars, "test", [{"jpg": jpeg(i), "cls": i % 3} for i in range(25)], per_shard=10)
    (cars / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    (cars / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    for name, color in COLORS.items():
        (root / "colors" / name.replace(" ", "_")).mkdir(parents=True)
        for i in range(4):
            image = Image.new("RGB", (32, 32), tuple(min(255, x + 8 * i) for x in color))
            image.save(root / "colors" / name.replace(" ", "_") / f"{i}.png")
    (root / "colors.json").write_text(json.dumps({"classnames": list(COLORS)}))
    captioned = [{"jpg": jpeg(i), "txt": f"one of {i}\nanother of {i}"} for i in range(12)]
    export(root / "wds_flickr", "test", captioned, per_shard=5)
    export(root / "plain", "test", [{"jpg": jpeg(i), "txt": f"only {i}"} for i in range(9)], 9)
    (root / "plain" / "test" / "nshards.txt").unlink()
    return {
        "cars": str(cars),
        "colors": str(root / "colors"),
        "colors.json": str(root / "colors.json"),
        "flickr": str(root / "wds_flickr"),
        "plain": f"{root}/plain/test/*.tar",
    }


def four_sets(places: dict[str, str]) -> list[str]:
    return [
        f"evaluate.sets.cars.data={places['cars']}",
        f"evaluate.sets.colors.data={places['colors']}",
        f"evaluate.sets.colors.classes={places['colors.json']}",
        "evaluate.sets.colors.templates=simple",
        f"evaluate.sets.flickr.data={places['flickr']}",
        f"evaluate.sets.plain.data={places['plain']}",
    ]


def alone(places: dict[str, str]) -> dict[str, list[str]]:
    """The same sets by the keys of a single one."""
    return {
        "cars": [
            f"evaluate.zero_shot_data={places['cars']}",
            f"evaluate.zero_shot_classes={places['cars']}",
        ],
        "colors": [
            f"evaluate.zero_shot_data={places['colors']}",
            f"evaluate.zero_shot_classes={places['colors.json']}",
            "evaluate.templates=simple",
        ],
        "flickr": [f"data.val={places['flickr']}"],
        "plain": [f"data.val={places['plain']}"],
    }


def test_each_set_has_its_numbers_and_each_kind_a_mean(places, weights, capsys):
    model = [str(weights), "model.name=tiny", "loss.widths={8: 1}"]
    scores = evaluated(capsys, *model, *four_sets(places))
    expected = {}
    for name, keys in alone(places).items():
        numbers = evaluated(capsys, *model, *keys)
        del numbers["name"], numbers["weights"]
        expected |= {f"{name}/{metric}": value for metric, value in numbers.items()}
    assert expected["cars/zero_shot_samples"] == 25 and expected["colors/zero_shot_samples"] == 12
    for metric in ("zero_shot_top1", "width_8/zero_shot_top5"):
        mean = (expected[f"cars/{metric}"] + expected[f"colors/{metric}"]) / 2
        expected[f"mean/{metric}"] = pytest.approx(mean)
    for metric in ("image_to_text_R@1", "width_8/text_retrieval_recall@5", "val_loss"):
        mean = (expected[f"flickr/{metric}"] + expected[f"plain/{metric}"]) / 2
        expected[f"mean/{metric}"] = pytest.approx(mean)
    assert {name: scores[name] for name in expected} == expected
    others = scores.keys() - expected.keys() - {"name", "weights"}
    assert all(name.startswith("mean/") for name in others)
    assert not any(name.startswith("mean/") and "samples" in name for name in scores)


def test_one_set_of_a_kind_has_no_mean(places, weights, capsys):
    keys = [f"evaluate.sets.cars.data={places['cars']}/test", f"data.val={places['plain']}"]
    scores = evaluated(capsys, str(weights), "model.name=tiny", *keys)
    assert scores["num_samples"] == 9 and "cars/zero_shot_top1" in scores
    assert not any(name.startswith("mean/") for name in scores)


FEATURES: list[weakref.ref[torch.Tensor]] = []


def features_before(encoded: Encoded) -> dict[str, float]:
    """How many of the features of earlier sets are still in memory."""
    alive = sum(feature() is not None for feature in FEATURES)
    FEATURES.append(weakref.ref(encoded.image))
    return {"features_before": alive}


def test_the_features_of_a_set_are_freed_before_the_next(places, weights, capsys):
    FEATURES.clear()
    sets = [f"evaluate.sets.set{i}.data={places['plain']}" for i in range(3)]
    own = "evaluate.functions=[tests.launcher.test_evaluation_sets.features_before]"
    scores = evaluated(capsys, str(weights), "model.name=tiny", *sets, own)
    assert len(FEATURES) == 3
    assert [scores[f"set{i}/features_before"] for i in range(3)] == [0, 0, 0]


@pytest.mark.engine
def test_a_run_is_scored_on_all_sets_and_keeps_its_best_checkpoint_by_the_mean(
    recipe, places, tmp_path
):
    keep = ["checkpoint.keep_best=mean/zero_shot_top5", "optim.ema_decay=0.1"]
    keys = ["run.steps=3", "schedule.warmup_steps=0", *keep, *four_sets(places)]
    status, out = run(recipe, *keys, ranks=2)
    assert status == 0, out
    assert "keep_best" not in out and "mean/zero-shot top-1" in out, out
    assert "cars/zero-shot top-1" not in out, out  # many sets are one short line
    scores = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[-1])
    assert scores["mean/zero_shot_top5"] == pytest.approx(
        (scores["cars/zero_shot_top5"] + scores["colors/zero_shot_top5"]) / 2
    )
    assert "ema_mean/zero_shot_top1" in scores and "ema_plain/val_loss" in scores
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"flickr: {places['flickr']}" in page
    assert "these names begin with <code>mean/</code>" in page
    # evaluate on the run's folder: the sets are in its recipe
    status, out = run(tmp_path / "run", "--json", verb="evaluate")
    assert status == 0, out
    again = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert again["mean/val_loss"] == pytest.approx(scores["mean/val_loss"], abs=2e-3)


@pytest.mark.engine
def test_a_set_that_fails_is_an_evaluation_that_fails(recipe, places, tmp_path):
    shard = tmp_path / "late" / "test"
    samples = [{"jpg": jpeg(i), "cls": 0 if i < 210 else 99} for i in range(220)]
    export(tmp_path / "late", "test", samples, per_shard=1000)
    sets = [
        f"evaluate.sets.late.data={shard}",
        f"evaluate.sets.late.classes={places['cars']}",
        f"evaluate.sets.plain.data={places['plain']}",
    ]
    status, out = run(recipe, "run.steps=2", "schedule.warmup_steps=0", *sets)
    assert status == 0, out
    assert "evaluate.sets.late.classes does not fit the data: a sample's cls is 99" in out, out
    assert "the evaluation after step 2" in (tmp_path / "run" / "VERDICT").read_text()
    assert (tmp_path / "run" / "eval.jsonl").read_text() == ""


def test_a_linear_probe_of_each_set(places, weights, capsys, tmp_path):
    model = [str(weights), "model.name=tiny", *four_sets(places)]
    samples = [{"jpg": jpeg(i), "cls": i % 3} for i in range(25)]
    cars = export(tmp_path / "wds_cars", "train", samples, per_shard=10)
    probes = ["--linear-probe", f"colors={places['colors']}", "--linear-probe", f"cars={cars}"]
    scores = evaluated(capsys, *model, *probes)
    assert scores["colors/linear_probe_top1"] == 1  # fitted on the images that it is tested on
    assert 0 <= scores["cars/linear_probe_top1"] <= scores["cars/linear_probe_top5"] == 1
    assert scores["mean/linear_probe_top1"] == pytest.approx(
        (1 + scores["cars/linear_probe_top1"]) / 2
    )
    assert 1e-10 <= scores["cars/linear_probe_l2"] <= 100
    assert "mean/linear_probe_l2" not in scores and "flickr/linear_probe_top1" not in scores
    without = evaluated(capsys, *model)
    assert without.items() <= scores.items()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "{colors}",
            "--linear-probe ({colors}): there are several sets with classes (cars, colors); name "
            "one, as in --linear-probe cars={colors}",
        ),
        ("cars={cars}", "{cars} has no training images (train/nshards.txt)"),
        ("cars=nowhere.tar", "--linear-probe (nowhere.tar): 1 of 1 shards do not exist"),
        ("flickr={cars}", "flickr is not a set with classes (cars, colors); correct the name."),
        ("crs={cars}", "crs is not a set with classes (cars, colors); did you mean cars?"),
        ("cars=", "--linear-probe (cars=) names no images; add their place"),
        ("colors={plain}", "--linear-probe: 0 of the training images have a label"),
    ],
)
def test_mistakes_in_a_linear_probe(places, weights, capsys, option, message):
    line = [str(weights), "model.name=tiny", *four_sets(places)]
    assert main(["evaluate", *line, "--linear-probe", filled(option, places)]) == 2
    assert filled(message, places) in capsys.readouterr().err


def test_a_probe_of_the_only_set():
    cars = EvaluationSet("data", "key", "cars", classes="classes.json")
    (probed,) = with_probes([cars], ["by/date=1/x.tar"])
    assert probed.train == "by/date=1/x.tar"
    with pytest.raises(UserError, match=r"crs is not a set .* did you mean cars\?"):
        with_probes([cars], ["crs=/data/cars"])
    with pytest.raises(UserError, match=r"\(b.tar\): cars has one already; remove one"):
        with_probes([cars], ["cars=a.tar", "b.tar"])
    with pytest.raises(RankError, match=r"--linear-probe \(http://127.0.0.1:9/x\) cannot be read"):
        with_probes([cars], ["cars=http://127.0.0.1:9/x"])


def test_a_linear_probe_needs_classes(places, weights, capsys):
    line = [str(weights), "model.name=tiny", f"data.val={places['plain']}"]
    assert main(["evaluate", *line, "--linear-probe", places["colors"]]) == 2
    assert "needs images to test on, with classes" in capsys.readouterr().err


MISTAKES: dict[str, tuple[list[str], str]] = {
    "shards that do not exist": (
        ["evaluate.sets.coco.data=nowhere.tar"],
        "evaluate.sets.coco.data (nowhere.tar): 1 of 1 shards do not exist",
    ),
    "braces": (
        ["evaluate.sets.coco.data='{0..3.tar'"],
        "evaluate.sets.coco.data ({0..3.tar): the braces do not balance",
    ),
    "classes that do not exist": (
        ["evaluate.sets.cars.data={plain}", "evaluate.sets.cars.classes=no.json"],
        "evaluate.sets.cars.classes: no.json does not exist",
    ),
    "a folder of classes without names": (
        ["evaluate.sets.birds.data={colors}"],
        "labeled images need evaluate.sets.birds.classes",
    ),
    "folders of other classes": (
        ["evaluate.sets.birds.data={colors}", "evaluate.sets.birds.classes=imagenet"],
        "and evaluate.sets.birds.classes has 1000 classes",
    ),
    "labels without classes": (
        ["evaluate.sets.cars.data={cars}/test/0.tar"],
        "none of the first 10 samples of {cars}/test/0.tar has a caption. Labeled images need "
        "evaluate.sets.cars.classes",
    ),
    "a label that is not a class": (
        ["evaluate.sets.cars.data={cars}", "evaluate.sets.cars.classes=one.json"],
        "does not fit evaluate.sets.cars.classes (one.json): a sample's cls is 1, none of the 1 "
        "classes; correct the label, give the classes of this data, or take evaluate.sets.cars out",
    ),
    "templates without classes": (
        ["evaluate.sets.coco.data={plain}", "evaluate.sets.coco.templates=simple"],
        "evaluate.sets.coco.templates (simple) is for labeled images; set "
        "evaluate.sets.coco.classes as well",
    ),
    "a name twice": (
        ["evaluate.sets.coco.data={plain}", "data.val={coco: x.tar}"],
        "evaluate.sets.coco and data.val.coco: the scores of both would have the same names",
    ),
    "the name of the means": (
        ["evaluate.sets.mean.data={plain}"],
        "evaluate.sets.mean: the scores named mean/... are the means over sets",
    ),
    "a name with a slash": (
        ["evaluate.sets={a/b: {data: x.tar}}"],
        "evaluate.sets ({a/b: {data: x.tar}}) must be sections by names of letters",
    ),
    "an unknown key": (
        ["evaluate.sets.cars={data: x.tar, classnames: y}"],
        "evaluate.sets.cars.classnames ('y'): no such key; known keys are data, classes, templates",
    ),
    "a missing key": (
        ["evaluate.sets.cars.classes=imagenet"],
        "evaluate.sets.cars.data is missing",
    ),
    "a wrong value": (
        ["evaluate.sets.cars={data: x.tar, templates: long}"],
        "evaluate.sets.cars.templates ('long') must be 'openai' or 'simple'",
    ),
}


def filled(text: str, places: dict[str, str]) -> str:
    for name in ("cars", "colors", "plain"):
        text = text.replace("{" + name + "}", places[name])
    return text


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_names_its_set_before_training(
    recipe, places, case, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("one.json").write_text('{"classnames": ["a"]}')
    keys, message = MISTAKES[case]
    line = [str(recipe), *(filled(key, places) for key in keys)]
    assert main(["train", "--dry-run", *line]) == 2
    assert filled(message, places) in capsys.readouterr().err


def test_evaluate_checks_all_sets_first(places, weights, capsys):
    line = [*four_sets(places), "evaluate.sets.last.data=nowhere.tar"]
    assert main(["evaluate", str(weights), "model.name=tiny", *line]) == 2
    printed = capsys.readouterr()
    assert "evaluate.sets.last.data (nowhere.tar): 1 of 1 shards do not exist" in printed.err
    assert "zero_shot" not in printed.out


def test_paths_of_sets_are_expanded_and_frozen_absolute(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "wds").mkdir()
    sets: dict[str, Any] = {
        "a": {"data": "wds", "classes": "wds/classes.json"},
        "b": {"data": "~/b.tar", "classes": "imagenet"},
        "c": {"data": "s3://bucket/c.tar"},
    }
    config = load_config(str(recipe), [f"evaluate.sets={json.dumps(sets)}"])
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(frozen_recipe(config, tmp_path))
    found = load_config(str(frozen)).evaluate.sets
    assert found is not None
    assert (found["a"].data, found["a"].classes) == (
        f"{tmp_path}/wds",
        f"{tmp_path}/wds/classes.json",
    )
    assert (found["b"].data, found["b"].classes) == (f"{tmp_path}/b.tar", "imagenet")
    assert (found["c"].data, found["c"].classes) == ("s3://bucket/c.tar", None)
