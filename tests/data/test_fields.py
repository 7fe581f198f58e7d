"""One reader of fields of a `.json`: what is missing, and what is equal."""

from __future__ import annotations

import json
import math
import tarfile
from pathlib import Path
from typing import Any

import pytest

from clip_train.data.config import DataConfig
from clip_train.data.loader import TrainLoader
from clip_train.data.validation import ValLoader
from clip_train.data.values import GroupId
from clip_train.evaluate.zero_shot import ZeroShotClasses
from launcher.cli.main import main
from tests.data.shards import counted, jpeg, write_shard

MISSING = ["NaN", "Infinity", "null", '""', '" "', "[]", "{}", "[null]", '["", " "]', "[NaN]"]
EQUAL = {
    "3": ["3", "3.0", '"3"', '" 3\\n"', "[3]", "[3.0]"],
    "cat": ['"cat"', '"cat "', '["cat"]'],
}
NESTED = {
    "list": ["[3, 4]", "[3.0, 4]"],
    "object": ['{"a": 1, "b": 2}', '{"b": 2.0, "a": 1}'],
}


def write(folder: Path, values: list[str]) -> str:
    members = []
    for number, value in enumerate(values):
        members += [
            (f"{number}.jpg", jpeg(number)),
            (f"{number}.txt", f"text {number}".encode()),
            (f"{number}.json", f'{{"x": {value}, "cls": {value}}}'.encode()),
        ]
    write_shard(folder / "0.tar", members)
    return str(folder / "0.tar")


def groups(folder: Path, values: list[str]) -> list[int]:
    config = DataConfig(train=write(folder, values), workers=0, lanes=1)
    sizes: dict[str, Any] = {"image_size": 8, "context_length": 8, "global_size": len(values)}
    with TrainLoader(config, **sizes, seed=7, values={"ids": GroupId("json.x")}) as loader:
        batch = next(loader)
    found = dict(zip(batch.keys, batch.columns["ids"].tolist(), strict=True))
    return [found[str(number)] for number in range(len(values))]


def test_missing_values_are_no_group(tmp_path):
    assert groups(tmp_path, MISSING) == [-1] * len(MISSING)


@pytest.mark.parametrize("values", [*EQUAL.values(), *NESTED.values()], ids=[*EQUAL, *NESTED])
def test_equal_values_are_one_group(tmp_path, values):
    found = groups(tmp_path, [*values, '"another"', "0", "false"])
    assert len({*found[: len(values)]}) == 1 and len({*found}) == 4 and min(found) >= 0


def label_of(tmp_path: Path, value: str, **classes: Any) -> int:
    (batch,) = ValLoader(
        counted(write(tmp_path, [value])), image_size=8, context_length=8, batch_size=4
    )
    label = ZeroShotClasses(classnames=["owl", "fox", "ant", "cat"], **classes).labeller()
    return label(batch.captions[0][0], batch.metadata[0])


@pytest.mark.parametrize("value", MISSING)
def test_missing_values_are_no_label(tmp_path, value):
    assert label_of(tmp_path, value, label_key="x") == -1


@pytest.mark.parametrize("value", [*EQUAL["3"], *EQUAL["cat"]])
def test_equal_values_are_one_label(tmp_path, value):
    assert label_of(tmp_path, value, label_key="x") == 3


def test_a_number_that_is_no_index_is_no_label(tmp_path):
    for value in ("3.5", "true", "-1"):
        with pytest.raises(ValueError, match="none of the 4 classes"):
            label_of(tmp_path, value, label_key="x")


@pytest.mark.parametrize(
    ("content", "expected"), [(b"2", 2), (b" 2.0\n", 2), (b"fox", 1), (b"", -1), (b"nan", -1)]
)
def test_a_cls_member_is_read_alike(tmp_path, content, expected):
    write_shard(tmp_path / "0.tar", [("0.jpg", jpeg(0)), ("0.cls", content)])
    index = counted(str(tmp_path / "0.tar"))
    (batch,) = ValLoader(index, image_size=8, context_length=8, batch_size=4, labelled=True)
    label = ZeroShotClasses(classnames=["owl", "fox", "ant"]).labeller()
    assert label("", batch.metadata[0]) == expected


def test_a_class_named_nan_is_a_class():
    label = ZeroShotClasses(classnames=["owl", "nan"]).labeller()
    assert label("", {"cls": "nan"}) == 1


def test_a_missing_caption_is_no_caption(tmp_path):
    """The next name counts."""
    index = counted(write(tmp_path, ["NaN", "{}", "null", "[]"]))
    for names, reason in ((["json.x"], True), (["json.x", "txt"], False)):
        loader = ValLoader(index, image_size=8, context_length=8, batch_size=4, caption_key=names)
        assert [bool(batch.keys) for batch in loader] == ([] if reason else [True])
        reasons = {each.reason for each in loader.invalid}
        assert reasons == ({"no caption", "caption is empty"} if reason else set())


def test_kept_columns_are_valid_json(tmp_path):
    """pandas' NaN, as pyarrow, JSON lines and lists carry it, becomes null."""
    values: list[Any] = [math.nan, 2.5, math.inf, None, [1.0, math.nan], {"a": math.nan}]
    lines = []
    for number, value in enumerate(values):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
        lines.append(json.dumps({"image": f"{number}.jpg", "caption": "a text", "x": value}))
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    assert main(["shards", str(tmp_path / "x.jsonl"), str(out), "--keep-columns", "x"]) == 0

    def strict(constant: str) -> None:
        raise AssertionError(constant)

    with tarfile.open(out / "00000.tar") as tar:
        found = [
            json.loads(tar.extractfile(name).read(), parse_constant=strict)["x"]  # type: ignore[union-attr]
            for name in tar.getnames()
            if name.endswith(".json")
        ]
    assert found == [None, 2.5, None, None, [1.0, None], {"a": None}]


def test_labels_of_a_table_are_read_alike(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    lines = [
        json.dumps({"image": f"{number}.jpg", "caption": "a", "kind": value})
        for number, value in enumerate([3.0, None, 3, [1.0]])
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    assert main(["shards", str(tmp_path / "x.jsonl"), str(out), "--label-key", "kind"]) == 0
    with tarfile.open(out / "00000.tar") as tar:
        labels = {
            name: tar.extractfile(name).read()  # type: ignore[union-attr]
            for name in tar.getnames()
            if name.endswith(".cls")
        }
    assert [*labels.values()] == [b"3", b"3", b"1"]
    (tmp_path / "x.csv").write_text(
        "image,caption,kind\n0.jpg,a,3.0\n1.jpg,b,\n2.jpg,c,3\n3.jpg,d, 1.0 \n"
    )
    out = tmp_path / "again"
    assert main(["shards", str(tmp_path / "x.csv"), str(out), "--label-key", "kind"]) == 0
    with tarfile.open(out / "00000.tar") as tar:
        assert [name for name in tar.getnames() if name.endswith(".cls")] == [*labels]
