"""Every validation sample comes once, on one rank, and no other rank reads it."""

import io
import json
from pathlib import Path

import pytest
import torch

from clip_train.data.validation import ImageFolder, ValLoader
from clip_train.errors import UserError
from tests.data.shards import (
    counted,
    jpeg,
    keys_in,
    sample,
    shards_open_as,
    write_dataset,
    write_shard,
)


def load(train, rank=0, world_size=1, index=None, **arguments):
    defaults = {"image_size": 16, "context_length": 8, "batch_size": 4}
    index = index or counted(train)
    return ValLoader(index, rank=rank, world_size=world_size, **{**defaults, **arguments})


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_no_repeat_no_drop(tmp_path, world_size):
    val = write_dataset(tmp_path, [5, 1, 8])
    order = [key for batch in load(val) for key in batch.keys]
    assert len(order) == 14 and set(order) == keys_in(tmp_path)
    shares = [[]] * world_size
    for rank in range(world_size):
        shares[rank] = [key for batch in load(val, rank, world_size) for key in batch.keys]
    assert [key for share in shares for key in share] == order
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_reads_its_own_share_alone(tmp_path, monkeypatch):
    """Of the shards that lie before it not a byte, of the one that it shares no more than headers."""
    val = write_dataset(tmp_path, [30] * 8)
    loaders = [load(val, rank, 4) for rank in range(4)]
    size = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    read = []

    class Metered(io.BytesIO):
        def read(self, n=-1):
            data = super().read(n)
            read.append(len(data))
            return data

    shards_open_as(monkeypatch, Metered)
    for loader in loaders:
        read.clear()
        assert sum(len(batch.keys) for batch in loader) == 60
        assert sum(read) < 0.3 * size


def test_batches_and_repetition(tmp_path):
    loader = load(write_dataset(tmp_path, [10]))
    first, second = list(loader), list(loader)
    assert [len(batch.keys) for batch in first] == [4, 4, 2]
    assert all(torch.equal(a.images, b.images) for a, b in zip(first, second, strict=True))
    assert first[0].images.shape == (4, 3, 16, 16) and first[0].images.dtype == torch.uint8
    assert first[0].texts.shape == (4, 8)
    assert first[0].captions == [[f"caption {i}"] for i in range(4)]


def test_threads_change_nothing(tmp_path):
    val = write_dataset(tmp_path, [9])
    one, many = list(load(val, workers=0)), list(load(val, workers=3))
    assert all(
        torch.equal(a.images, b.images) and a.keys == b.keys for a, b in zip(one, many, strict=True)
    )


def test_metadata_and_bad_samples(tmp_path):
    members = [*sample("a", 0), ("a.json", json.dumps({"classname": "cat"}).encode())]
    members += [("b.jpg", jpeg(0)[:100]), ("b.txt", b"x"), ("c.jpg", jpeg(1)), *sample("d", 2)]
    loader = load(write_shard(tmp_path / "a.tar", members))
    (batch,) = list(loader)
    assert batch.keys == ["a", "d"]
    assert batch.metadata == [{"classname": "cat"}, {}]
    assert len(loader.invalid) == 2
    assert {each.reason for each in loader.invalid} == {"image does not decode", "no caption"}


def test_a_cls_member_is_the_label(tmp_path):
    members = [
        *sample("a", 0),
        ("a.cls", b"7\n"),
        *sample("b", 1),
        ("b.json", b'{"cls": 1}'),
        ("b.cls", b"2"),
    ]
    (batch,) = list(load(write_shard(tmp_path / "a.tar", members)))
    assert batch.metadata == [{"cls": "7"}, {"cls": "2"}]


def test_all_captions_of_an_image(tmp_path):
    """A list in the .json. A .txt is one caption."""
    members = [
        ("a.jpg", jpeg(0)),
        ("a.json", json.dumps({"captions": ["one", " ", "two"]}).encode()),
    ]
    members += [("b.jpg", jpeg(1)), ("b.json", b'{"captions": "three"}')]
    (batch,) = load(write_shard(tmp_path / "a.tar", members), caption_key="captions")
    assert batch.captions == [["one", "two"], ["three"]] and batch.texts.shape == (3, 8)
    write_shard(tmp_path / "b.tar", [("a.jpg", jpeg(0)), ("a.txt", b"10\nanother")])
    (batch,) = load(tmp_path / "b.tar")
    assert batch.captions == [["10\nanother"]]


def test_labelled_images_need_no_captions(tmp_path):
    members = [
        ("a.jpg", jpeg(0)),
        ("a.cls", b"3"),
        *sample("b", 1),
        ("b.cls", b"4"),
        ("c.cls", b"5"),
    ]
    loader = load(write_shard(tmp_path / "a.tar", members), labelled=True)
    (batch,) = loader
    assert [each["cls"] for each in batch.metadata] == ["3", "4"] and batch.texts.shape == (0, 8)
    assert [each.reason for each in loader.invalid] == ["no image"]


def write_folder(root, names):
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number) if path.suffix.lower() != ".txt" else b"no image")


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_folder_for_each_class(tmp_path, world_size):
    """As torchvision's ImageFolder reads it."""
    names = [
        "n02/b.JPEG",
        "n02/a.jpg",
        "n01/z/deep.png",
        "n01/y.jpg",
        "n10/x.jpg",
        "n10/x.txt",
        "notes.txt",
    ]
    write_folder(tmp_path, names)
    folder = ImageFolder.find(str(tmp_path), "evaluate.zero_shot_data")
    found = []
    for rank in range(world_size):
        for batch in load(tmp_path, rank, world_size, labelled=True, index=folder):
            found += [
                (key, each["cls"]) for key, each in zip(batch.keys, batch.metadata, strict=True)
            ]
    expected = [
        ("n01/y.jpg", "0"),
        ("n01/z/deep.png", "0"),
        ("n02/a.jpg", "1"),
        ("n02/b.JPEG", "1"),
        ("n10/x.jpg", "2"),
    ]
    assert found == expected
    with pytest.raises(
        UserError, match=r"has 3 folders of classes .*zero_shot_classes has 1000 classes"
    ):
        folder.label_by([f"class {number}" for number in range(1000)])


def test_folders_that_are_numbers_are_labels(tmp_path):
    """ImageNet-V2's: by their names 10 would come before 2."""
    write_folder(tmp_path, ["10/a.jpg", "2/b.jpg"])
    folder = ImageFolder.find(str(tmp_path), "evaluate.zero_shot_data")
    (batch,) = load(tmp_path, labelled=True, index=folder)
    assert dict(zip(batch.keys, batch.metadata, strict=True)) == {
        "10/a.jpg": {"cls": "10"},
        "2/b.jpg": {"cls": "2"},
    }
    assert folder.label_by([f"class {number}" for number in range(11)]).labels == [10, 2]


def folder_of(root: Path, *names: str) -> ImageFolder:
    write_folder(root, [f"{name}/0.jpg" for name in names])
    found = ImageFolder.find(str(root), "evaluate.zero_shot_data")
    assert found is not None
    return found


def labels(folder: ImageFolder, classes: list[str]) -> dict[str, int]:
    return dict(zip(folder.classes, folder.label_by(classes).labels, strict=True))


@pytest.mark.parametrize(
    ("folders", "classes", "expected"),
    [
        (["blue", "gray", "red"], ["red", "gray", "blue"], [2, 1, 0]),
        (["Red_Fox", "snow owl"], ["Snow Owl", "red fox"], [1, 0]),
        (["n01", "n02", "n10"], ["owl", "fox", "ant"], [0, 1, 2]),
        (["1", "10", "2"], ["2", "10", "1"], [2, 1, 0]),
        (["a_owl", "b_fox"], ["owl", "fox"], [0, 1]),
        (["n1", "n2", "n3"], ["crane", "maillot", "crane"], [0, 1, 2]),
    ],
)
def test_folders_named_as_classes_are_those_classes(tmp_path, folders, classes, expected):
    """Otherwise they are in the order of their names."""
    assert labels(folder_of(tmp_path, *folders), classes) == dict(
        zip(folders, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("folders", "classes", "reason"),
    [
        (["blue", "green", "red"], ["red", "green", "blue sky"], "folder 2 is 'red'"),
        (["class1", "class10", "class2"], ["owl", "fox", "ant"], "sort differently"),
        ([str(number) for number in range(1, 11)], [*"abcdefghij"], "numbers from 0 on"),
        (["1", "01"], ["owl", "fox"], "two folders are the same number"),
        (["owl", "fox"], ["owl", "fox", "ant"], "their numbers differ"),
    ],
)
def test_folders_that_contradict_the_classes_are_refused(tmp_path, folders, classes, reason):
    with pytest.raises(UserError, match=reason) as raised:
        folder_of(tmp_path, *folders).label_by(classes)
    for name in [*folders, *classes]:
        assert name in str(raised.value)


def test_hidden_folders_are_no_classes(tmp_path):
    folder = folder_of(tmp_path, "blue", "red", ".ipynb_checkpoints", "__MACOSX", "red/.hidden")
    assert folder.classes == ["blue", "red"]
    assert [path for path, _ in folder.images] == ["blue/0.jpg", "red/0.jpg"]


def test_skipped_files_beside_the_images_are_counted(tmp_path):
    write_folder(tmp_path, ["a/0.jpg", "a/0.svg", "beside.jpg", "b/1.jpg"])
    folder = ImageFolder.find(str(tmp_path), "evaluate.zero_shot_data")
    assert str(folder.skipped) == "2 files: 1 .jpg (such as beside.jpg), 1 .svg (such as a/0.svg)"


def test_what_is_no_folder_of_classes(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"evaluate\.zero_shot_data \(.*has no images in a folder for each class"
    ):
        ImageFolder.find(str(tmp_path), "evaluate.zero_shot_data")
    assert ImageFolder.find(str(tmp_path / "*.tar"), "x") is None


def test_errors(tmp_path):
    with pytest.raises(UserError, match=r"data\.val"):
        load(tmp_path / "*.tar")
    write_shard(tmp_path / "a.tar", [("a.jpg", b"x")])
    loader = load(tmp_path / "a.tar")
    assert list(loader) == [] and [each.reason for each in loader.invalid] == ["no caption"]
