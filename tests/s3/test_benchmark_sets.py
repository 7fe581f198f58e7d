"""clip_benchmark's data sets in a bucket and in another store, as on a disk."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from clip_train.data.benchmark import benchmark_shards, has_classes, training_split
from clip_train.errors import UserError
from clip_train.models.clip import build_model
from clip_train.models.config import load_architecture
from launcher.cli.main import main
from tests.data.shards import jpeg
from tests.launcher.test_benchmark_sets import CLASSES, TEMPLATES, captions_of, export
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """The arguments of `evaluate` for random weights."""
    torch.manual_seed(0)
    state = build_model(load_architecture("tiny")).state_dict()
    save_file({name: x.detach().clone() for name, x in state.items()}, tmp_path / "w.safetensors")
    return [str(tmp_path / "w.safetensors"), "model.name=tiny"]


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """The folder above wds_cars, which has classes and training images, and wds_captions."""
    cars = tmp_path / "sets" / "wds_cars"
    for split, first in (("test", 0), ("train", 40)):
        samples = [{"jpg": jpeg(first + i), "cls": i % 3} for i in range(25)]
        export(cars, split, samples, per_shard=10)
    (cars / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    (cars / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    samples = [{"jpg": jpeg(i), "txt": "\n".join(captions_of(i))} for i in range(12)]
    export(tmp_path / "sets" / "wds_captions", "test", samples, per_shard=5)
    return tmp_path / "sets"


def scores(capsys: pytest.CaptureFixture[str], root: str, *arguments: str) -> dict[str, Any]:
    """Of three sets: named by their folder, by a split's, and by shards with several lines."""
    line = [
        *arguments,
        f"evaluate.sets.cars.data={root}/wds_cars",
        f"evaluate.sets.again.data={root}/wds_cars/test/",
        f"evaluate.sets.coco.data={root}/wds_captions",
        f"data.val={root}/wds_captions/test/{{0..2}}.tar",
        "--linear-probe",
        f"cars={root}/wds_cars",
    ]
    status = main(["evaluate", *line, "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return json.loads(printed.out.splitlines()[-1])


def test_sets_in_a_bucket_are_those_on_a_disk(
    sets: Path, model: list[str], view: Bucket, proxy: FaultyProxy, capsys: Any
) -> None:
    for file in sets.rglob("*.*"):
        view.put(f"sets/{file.relative_to(sets)}", file.read_bytes())
    expected = scores(capsys, str(sets), *model)
    assert expected["cars/zero_shot_samples"] == 25 and expected["coco/num_samples"] == 12
    # of 36 captions
    assert expected["image_retrieval_recall@1"] * 36 == pytest.approx(
        round(expected["image_retrieval_recall@1"] * 36)
    )
    busy = Fault("status", times=2, key="nshards|classnames")
    proxy.faults = [busy]
    found = scores(capsys, f"{view.url}/sets", *model)
    assert found == expected and busy.fired == 2
    # each of nine places of an nshards.txt is looked at once, and shards by name are not
    assert busy.seen < 20


def test_sets_in_another_store_are_those_on_a_disk(
    sets: Path, model: list[str], capsys: Any
) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    store = fsspec.filesystem("memory")
    for file in sets.rglob("*.*"):
        store.pipe_file(f"{root}/{file.relative_to(sets)}", file.read_bytes())
    assert scores(capsys, root, *model) == scores(capsys, str(sets), *model)


def test_sets_are_found_without_the_right_to_list(
    sets: Path, view: Bucket, proxy: FaultyProxy
) -> None:
    """Then S3 refuses to read what is not there."""
    for file in sets.rglob("*.txt"):
        view.put(f"sets/{file.relative_to(sets)}", file.read_bytes())
    missing = r"wds_cars/nshards|test/classnames|wds_captions/(nshards|test/x)"
    refused = Fault("status", key=missing, code=403, s3code="AccessDenied", method="GET|HEAD")
    proxy.faults = [refused]
    cars, captions = f"{view.url}/sets/wds_cars", f"{view.url}/sets/wds_captions"
    assert benchmark_shards(cars) == [f"{cars}/test/{number}.tar" for number in range(3)]
    assert has_classes(cars) and has_classes(f"{cars}/test") and not has_classes(captions)
    assert training_split(cars) == f"{cars}/train"
    assert benchmark_shards(f"{captions}/test/x") is None
    with pytest.raises(UserError, match="has no training images"):
        training_split(captions)
    assert refused.fired > 3
