"""Named inputs of a sample, and stages of a user's own, both named by a recipe."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import webdataset

from clip_train.data.config import DataConfig, check_source
from clip_train.data.invalid import InvalidSample
from clip_train.data.loader import TrainLoader
from clip_train.data.pixels import decode_image
from clip_train.data.validation import ValLoader
from clip_train.errors import DataError, UserError
from clip_train.inputs import layout_of, unpack
from launcher.cli.main import main
from tests.data.shards import counted, jpeg, write_shard

HERE = __name__


def number_of(sample: dict) -> int:
    return int(sample["__key__"].removeprefix("k"))


def signal(sample: dict) -> np.ndarray:
    """Fails on sample 3; of another length for sample 4."""
    return np.arange(1 if sample["num"] == b"4" else 5, dtype=np.float32) + 10 / (
        int(sample["num"]) - 3
    )


def drawn(sample: dict) -> torch.Tensor:
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def flag(sample: dict) -> bool:
    return sample["__seed__"] is not None


def odd(sample: dict) -> np.ndarray:
    return np.full((3,), number_of(sample), np.uint8)


def bare(sample: dict) -> int:
    return 1


signal.shape, signal.dtype = (5,), torch.float32
drawn.shape, drawn.dtype = (3,), torch.float32
flag.shape, flag.dtype = (), torch.bool
odd.shape, odd.dtype = (3,), torch.uint8
INPUTS = {name: f"{HERE}:{name}" for name in ("odd", "signal", "flag", "drawn")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """40 samples in two shards: a number, an image under another name, and a caption in capitals."""
    folder = tmp_path_factory.mktemp("own")
    for shard in range(2):
        numbers = range(20 * shard, 20 * shard + 20)
        members = [
            (f"k{i}.{name}", content)
            for i in numbers
            for name, content in (
                ("num", b"%d" % i),
                ("picture", jpeg(i)),
                ("txt", b"CAPTION %d" % i),
            )
        ]
        write_shard(folder / f"{shard}.tar", members)
    return folder


def batches(folder, steps=6, workers=0, world_size=1, **settings):
    """Of all ranks in turn, by key."""
    config = DataConfig(
        train=f"{folder}/*.tar", workers=workers, lanes=4, shuffle_block=8, bad_sample_limit=1,
        **settings,
    )  # fmt: skip
    own = {"image_size": 16, "context_length": 8, "global_size": 12, "seed": 5}
    found, invalid = [], {}
    for rank in range(world_size):
        with TrainLoader(config, **own, rank=rank, world_size=world_size) as loader:
            for _ in range(steps):
                batch = next(loader)
                rows = unpack(batch.images, loader.layout) if settings.get("inputs") else {}
                for place in batch.bad_samples:
                    invalid.setdefault(place.split("\t")[0], 0)
                    invalid[place.split("\t")[0]] += batch.bad_samples[place]
                for i, (key, seed) in enumerate(
                    zip(batch.keys, batch.sample_seeds.tolist(), strict=True)
                ):
                    values = {name: row[i].tolist() for name, row in rows.items()}
                    found.append((seed, key, values, batch.images[i].tolist()))
    return sorted(found, key=lambda each: each[:2]), invalid


def test_inputs_are_what_their_functions_return(folder):
    found, invalid = batches(folder, inputs=INPUTS)
    for seed, key, values, _ in found:
        number = int(key[1:])
        assert values["odd"] == [number] * 3 and values["flag"] is True
        expected = np.arange(5, dtype=np.float32) + np.float32(10 / (number - 3))
        assert values["signal"] == pytest.approx(expected.tolist(), rel=1e-6)
        assert values["drawn"][0] == np.float32(random.Random(seed).random())
    assert set(invalid) == {
        "data.inputs.signal: ZeroDivisionError",
        "data.inputs.signal: not float32 [5]",
    }
    assert not {"k3", "k4"} & {key for _, key, *_ in found}


@pytest.mark.parametrize("workers, world_size", [(2, 1), (0, 3)])
def test_inputs_depend_on_neither_workers_nor_ranks(folder, workers, world_size):
    expected = batches(folder, inputs=INPUTS)
    assert batches(folder, workers=workers, world_size=world_size, inputs=INPUTS) == expected


def test_any_row_can_be_unpacked_alone():
    """A float behind three bytes is aligned nowhere."""
    layout = layout_of(INPUTS, 16)
    assert [each.nbytes for each in layout] == [3, 20, 1, 12]
    rows = torch.arange(5 * 36, dtype=torch.uint8).view(5, 36)
    rows[:, 23] = 1  # a bool
    whole = unpack(rows, layout)
    for i in range(5):
        for name, value in unpack(rows[i : i + 1], layout).items():
            assert value.numpy().tobytes() == whole[name][i : i + 1].numpy().tobytes()
        signal = np.frombuffer(rows[i].numpy().tobytes()[3:23], np.float32)
        assert whole["signal"][i].numpy().tobytes() == signal.tobytes()


# ------------------------------------------------------------ stages


def to_lower(sample: dict) -> dict:
    return {**sample, "txt": sample["txt"].lower()}


def is_even(sample: dict) -> bool:
    return number_of(sample) % 2 == 0


def decoded(sample: dict) -> dict:
    """As a user's own decoder leaves it: pixels as an array."""
    return {**sample, "jpg": decode_image(sample["jpg"]).permute(1, 2, 0).numpy()}


def bad(samples):
    raise RuntimeError("no such thing")


def twice(samples):
    for sample in samples:
        yield from (sample, sample)


lower = webdataset.map(to_lower)
renamed = webdataset.rename(jpg="picture", txt="txt", num="num")
even = webdataset.select(is_even)
pixels = webdataset.map(decoded)
pil = webdataset.decode("pil", only="jpg")
ALL = [f"{HERE}.{name}" for name in ("renamed", "lower", "even")]


@pytest.mark.parametrize("workers", [0, 2])
def test_stages_of_a_recipe(folder, workers):
    found, invalid = batches(folder, workers=workers, stages=ALL)
    assert {int(key[1:]) % 2 for _, key, *_ in found} == {0}
    assert set(invalid) == {f"data.stages ({HERE}.even) dropped it"}
    assert sum(invalid.values()) == pytest.approx(36, abs=4)  # half of 72 places
    for decoder, scaled in (("pixels", False), ("pil", False), ("pixels", True), ("pil", True)):
        stages = [*ALL, f"{HERE}.{decoder}"]
        assert batches(folder, workers=workers, stages=stages, scaled_decode=scaled)[0] == found


def test_stages_come_before_all_else(folder, tmp_path):
    """The first look, inputs, and validation."""
    for path in ("jpg", "picture"):
        write_shard(
            tmp_path / "0.tar", [(f"k6.{path}", jpeg(6)), ("k6.txt", b"A"), ("k6.num", b"6")]
        )
        stages = None if path == "jpg" else ALL
        assert check_source(DataConfig(train=f"{tmp_path}/0.tar", stages=stages)).first_key == "k6"
    inputs = {"image": "image", **INPUTS}
    loader = ValLoader(
        counted(f"{folder}/*.tar"),
        image_size=16,
        context_length=8,
        batch_size=40,
        stages=ALL,
        inputs=inputs,
    )
    (batch,) = loader
    assert len(loader.invalid) == 21 and batch.captions[0] == ["caption 0"]  # 4 is even
    rows = unpack(batch.images, loader.layout)
    plain = ValLoader(
        counted(f"{folder}/*.tar"), image_size=16, context_length=8, batch_size=40, stages=ALL
    )
    keys, images = next((b.keys, b.images) for b in plain)
    kept = [keys.index(key) for key in batch.keys]
    assert torch.equal(rows["image"], images[kept]) and not rows["flag"].any()


def test_a_stage_that_fails_or_repeats_is_named(folder, tmp_path):
    with pytest.raises(UserError, match=rf"data.stages \({HERE}.twice\) must map one .* made 2"):
        batches(folder, stages=[*ALL, f"{HERE}.twice"])
    first = DataConfig(train=f"{folder}/*.tar", stages=[f"{HERE}.bad"])
    with pytest.raises(UserError, match=r"k0.*bad\): RuntimeError \(no such thing\)\. Its"):
        check_source(first)
    with pytest.raises(DataError, match=r"10000 samples in a row cannot be used(.|\n)*bad"):
        batches(folder, stages=[f"{HERE}.bad"])
    with pytest.raises(InvalidSample, match=r"not uint8 \[H, W, 3\]"):
        decode_image(np.zeros((8, 8, 3), np.float32))


def test_mistakes_in_inputs_are_said_at_first_sight(folder):
    with pytest.raises(UserError, match=r"data.inputs.x \(.*bare\) must be a function that decl"):
        layout_of({"x": f"{HERE}.bare"}, 16)
    with pytest.raises(UserError, match=r"data.inputs.x \(.*none\) cannot be imported"):
        layout_of({"x": f"{HERE}.none"}, 16)
    write_shard(folder.parent / "k4.tar", [("k4.num", b"4"), ("k4.txt", b"x")])
    config = DataConfig(train=f"{folder.parent}/k4.tar", inputs={"s": f"{HERE}.signal"})
    with pytest.raises(UserError, match=r"not float32 \[5\] \(it returned torch.float32 \[1\]\)"):
        check_source(config)
    with pytest.raises(ValueError, match=r"data.inputs \(.*\) cannot read data.kind \(synthetic\)"):
        DataConfig(kind="synthetic", train="x", inputs={"s": f"{HERE}.signal"})


def test_a_first_sample_needs_an_image_if_one_is_named(tmp_path):
    write_shard(tmp_path / "0.tar", [("k1.num", b"1"), ("k1.txt", b"x")])
    for inputs in ({"image": "image"}, {"image": "image", "odd": f"{HERE}.odd"}):
        with pytest.raises(UserError, match="no image"):
            check_source(DataConfig(train=f"{tmp_path}/0.tar", inputs=inputs))
    inputs = {"odd": f"{HERE}.odd"}
    assert check_source(DataConfig(train=f"{tmp_path}/0.tar", inputs=inputs)).first_key == "k1"


def test_shards_without_images_have_an_index(tmp_path, capsys):
    write_shard(tmp_path / "0.tar", [("a.wav", b"x"), ("a.txt", b"y")])
    assert main(["index", f"{tmp_path}/*.tar", "--workers", "1"]) == 0
    assert "1 of 1 samples cannot be used as they are: 1 no image" in capsys.readouterr().out
