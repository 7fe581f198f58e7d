"""The data sets that need no download, and the writer, read back by webdataset itself."""

import hashlib
import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from webdataset import tariterators

from clip_tools.demo import shapes
from clip_train.data.config import DataConfig, check_source
from clip_train.data.tar import write_shards
from clip_train.data.validation import ValLoader
from clip_train.errors import UserError
from tests.data.shards import counted


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(
        b"".join(path.name.encode() + path.read_bytes() for path in files)
    ).hexdigest()


def captions(pattern: str) -> list[str]:
    out = []
    for path in sorted(Path(pattern).parent.glob("*.tar")):
        with tarfile.open(path) as tar:
            out += [tar.extractfile(m).read().decode() for m in tar if m.name.endswith(".txt")]
    return out


def test_shapes(tmp_path):
    ticks = []
    data = shapes(
        tmp_path / "a",
        120,
        size=32,
        per_shard=50,
        progress=lambda: ticks.append(1),
    )
    assert len(ticks) == 120 + 608
    assert data.num_val == 608
    summary = check_source(DataConfig(train=data.train, val=data.val))
    assert len(summary.index.shards) == 3
    classes = json.loads(Path(data.classes).read_text())
    assert len(classes["classnames"]) == len(set(classes["classnames"])) == 76
    val = Counter(captions(data.val))
    assert set(val.values()) == {8}
    assert set(val) == {t.format(c) for t in classes["templates"] for c in classes["classnames"]}
    # a held-out combination is never trained on, in any of the templates' word orders
    held_out = [
        frozenset(name.split()) - {"on", "a", "background"} for name in classes["classnames"]
    ]
    train = captions(data.train)
    assert len(train) == 120
    assert not any(
        combination <= set(c.replace(",", "").split()) for combination in held_out for c in train
    )
    batch = next(iter(ValLoader(counted(data.val), image_size=32, context_length=16, batch_size=8)))
    assert batch.metadata[0]["classname"] in batch.captions[0][0]


def test_same_parameters_same_bytes_and_at_once(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    shapes(a, 20, size=16)
    shapes(b, 20, size=16)
    assert digest(a) == digest(b)
    before = (a / "train" / "00000.tar").stat().st_mtime_ns
    shapes(a, 20, size=16, progress=lambda *_: pytest.fail("drew again"))
    assert (a / "train" / "00000.tar").stat().st_mtime_ns == before
    shapes(a, 20, size=16, seed=1)
    assert digest(a) != digest(b)


def test_a_failed_build_leaves_nothing(tmp_path):
    done = []

    def fail():
        done.append(1)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shapes(tmp_path / "a", 20, size=16, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        shapes(tmp_path, 5, size=16)
    assert (tmp_path / "precious.txt").exists()


def test_writer_is_read_by_webdataset(tmp_path):
    samples = [
        {"__key__": f"k{i}", "jpg": bytes([i]), "txt": f"caption {i}", "json": {"i": i}}
        for i in range(5)
    ]
    paths = write_shards(tmp_path, samples, 2)
    assert [path.name for path in paths] == ["00000.tar", "00001.tar", "00002.tar"]
    back = []
    for path in paths:
        with path.open("rb") as file:
            back += tariterators.group_by_keys(
                tariterators.tar_file_expander([{"url": str(path), "stream": file}])
            )
    assert [s["__key__"] for s in back] == [f"k{i}" for i in range(5)]
    assert [s["jpg"] for s in back] == [bytes([i]) for i in range(5)]
    assert json.loads(back[3]["json"]) == {"i": 3} and back[3]["txt"] == b"caption 3"


def test_writer_refuses_what_readers_would_merge(tmp_path):
    with pytest.raises(ValueError, match="dot"):
        write_shards(tmp_path, [{"__key__": "a.1", "jpg": b"x"}], 2)
    assert list(tmp_path.iterdir()) == []
