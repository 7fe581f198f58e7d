"""data.keep: exactly the kept samples, once an epoch, held against tarfile, json and plain Python."""

from __future__ import annotations

import collections
import json
import math
import random
import tarfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from clip_tools.shards.index import index_shards, write_indexes
from clip_train.data.config import DataConfig, check_source
from clip_train.data.index import INDEX_NAME, ShardIndex, index_of, parse, resume_data
from clip_train.data.keep import Expression, ExpressionError
from clip_train.data.loader import TrainLoader
from clip_train.errors import DataError, UserError
from clip_train.recipe.recipe import check_config, load_config, with_samples
from clip_train.storage.config import StorageConfig
from launcher.cli.main import main
from tests.covering import pairwise
from tests.data.shards import jpeg, sample, write_shard
from tests.data.test_order import keys_of, loader_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning"
)  # more than cores
SIZES = [130, 3, 1, 70, 64, 129, 17]
COLUMNS = ("clip_score", "width", "height", "lang", "uid", "sometimes")


def uid(number: int) -> str:
    """Some agree in their first half."""
    return f"{number // 3 * 0x9E3779B97F4A7C15 % 2**64:016x}{(number + 1) * 7919:016x}"


def fields_of(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    fields = {
        "uid": uid(number),
        "clip_score": round(draw.random(), 3),
        "width": draw.randrange(20, 40_000),
        "height": draw.randrange(20, 40_000),
        "lang": draw.choice(["en", "de", "d'é", " fr "]),
        "sometimes": draw.choice([None, 3, 2.5, float("nan"), True]),
    }
    for name in draw.sample(sorted(fields), draw.randrange(2)):
        if name != "uid":
            del fields[name]
    return fields


def write_scored(folder: Path, sizes: list[int], first: int = 0, prefix: str = "s") -> None:
    """Shards whose samples have a .json; every 40th is without one."""
    folder.mkdir(parents=True, exist_ok=True)
    number = first
    for shard, size in enumerate(sizes):
        members = []
        for i in range(size):
            members += sample(f"{prefix}{shard}n{i}", number)
            if number % 40 != 39:
                members += [(f"{prefix}{shard}n{i}.json", json.dumps(fields_of(number)).encode())]
            number += 1
        write_shard(folder / f"{prefix}{shard}.tar", members)


def index(folder: Path, columns: tuple[str, ...] = COLUMNS, pattern: str = "*.tar") -> None:
    paths = [str(path) for path in sorted(folder.glob(pattern))]
    write_indexes(index_shards(paths, workers=1, columns=columns))


def samples_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The .json of each sample by key, as tarfile and json read it; {} without one."""
    found: dict[str, dict[str, Any]] = {}
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                key, _, extension = member.name.partition(".")
                found.setdefault(key, {})
                if extension == "json":
                    found[key] = json.loads(tar.extractfile(member).read())  # type: ignore[union-attr]
    return found


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    write_scored(folder, SIZES)
    index(folder)
    return folder


def config_of(train: Path | str, keep: str | None, **settings: Any) -> DataConfig:
    defaults = {"workers": 0, "lanes": 8, "shuffle_block": 11}
    return DataConfig(train=str(train), keep=keep, **{**defaults, **settings})


# -- conditions

Row = dict[str, Any]


def has(row: Row, *names: str) -> bool:
    values = [row.get(name) for name in names]
    return all(value is not None and str(value) != "nan" for value in values)


CONDITIONS: dict[str, Callable[[Row], bool]] = {
    "clip_score > 0.28": lambda r: has(r, "clip_score") and r["clip_score"] > 0.28,
    "json.clip_score<=0.5": lambda r: has(r, "clip_score") and r["clip_score"] <= 0.5,
    "not clip_score > 0.28": lambda r: not (has(r, "clip_score") and r["clip_score"] > 0.28),
    "0.2 < clip_score <= .7": lambda r: has(r, "clip_score") and 0.2 < r["clip_score"] <= 0.7,
    "clip_score != 0.5": lambda r: has(r, "clip_score") and r["clip_score"] != 0.5,
    "width * height > 300000000": lambda r: (
        has(r, "width", "height") and r["width"] * r["height"] > 300_000_000
    ),
    "width / height < 3 and height / width < 3": lambda r: (
        has(r, "width", "height") and r["width"] / r["height"] < 3 and r["height"] / r["width"] < 3
    ),
    "lang == 'en' or lang == \"d'é\"": lambda r: r.get("lang") in ("en", "d'é"),
    "lang in ('en', 'fr')": lambda r: r.get("lang") in ("en", " fr "),
    "lang not in ['en']": lambda r: has(r, "lang") and r["lang"] != "en",
    "lang != 'en'": lambda r: has(r, "lang") and r["lang"] != "en",
    "width in (1, 30, 77) or -width < -39000": lambda r: (
        has(r, "width") and (r["width"] in (1, 30, 77) or r["width"] > 39_000)
    ),
    "sometimes": lambda r: has(r, "sometimes"),
    "sometimes < 3 and (clip_score + 1 > 1.5 or not width >= 9)": lambda r: (
        has(r, "sometimes")
        and r["sometimes"] < 3
        and ((has(r, "clip_score") and r["clip_score"] > 0.5) or not has(r, "width"))
    ),
    f"uid == '{uid(7)}'": lambda r: r.get("uid") == uid(7),
    f"uid not in ('{uid(7)}', '{uid(6).upper()}')": lambda r: (
        has(r, "uid") and r["uid"] not in (uid(6), uid(7))
    ),
}


@pytest.mark.parametrize("text", CONDITIONS)
def test_a_condition_keeps_what_plain_python_keeps(scored, text):
    """Counted, and read once in an epoch."""
    samples = samples_in(scored)
    expected = {key for key, row in samples.items() if CONDITIONS[text](row)}
    assert 0 < len(expected) < len(samples)
    config = config_of(scored / "*.tar", text, lanes=4)
    found = index_of(config.train, "auto", StorageConfig(), keep=config.kept)
    assert found.num_samples == len(expected) and found.kept.places == len(samples)
    with loader_of(config, global_size=1) as loader:
        assert sorted(next(loader).keys[0] for _ in expected) == sorted(expected)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("clip_score >", "is not an expression"),
        ("clip_score > 0.2; 1", "is not an expression"),
        ("1 < 2", "names no column"),
        ("__import__('os').system('x')", "is not allowed"),
        ("clip_score.real()", "is not allowed"),
        ("[x for x in y]", "is not allowed"),
        ("lambda: width", "is not allowed"),
        ("width ** 9", "is not allowed"),
        ("f'{width}' == 'x'", "is not allowed"),
        ("width if height else 3", "is not allowed"),
        ("(x := 3)", "is not allowed"),
        ("width == None", "is not allowed"),
        ("width is 3", "compare by"),
        ("width in height", "compare by"),
        ("width in ()", "compare by"),
        ("(" * 5000 + "width" + ")" * 5000, "is not an expression"),
    ],
)
def test_what_is_no_condition_is_a_mistake_of_the_recipe(text, reason):
    with pytest.raises(ExpressionError, match=reason):
        Expression.parse(text)
    recipe = {"run": {"steps": 1}, "data": {"train": "a.tar", "keep": text}}
    with pytest.raises(UserError, match=r"data\.keep \("):
        check_config(recipe, "recipe")


@pytest.mark.parametrize(
    "keep, message",
    [
        ("clip_scor > 0.28", r"no column clip_scor; did you mean clip_score\?.*To add it, run "),
        ("lang > 3", r"lang > 3 compares a text with a number"),
        ("lang", r"lang is a text, not a condition"),
        ("width + lang > 3", r"lang is a text, not a number"),
        ("uid == 'abc'", r"32 hexadecimal digits"),
        ("uid > 3", r"compares a uid with a number; a list of uids is a .npy"),
        (
            "clip_score > 7 and width < 0",
            r"keeps none of the 414 samples .*; clip_score is from 0\.\d+ to 0\.99\d*; width is ",
        ),
    ],
)
def test_what_the_columns_do_not_allow_is_explained(scored, keep, message):
    with pytest.raises(UserError, match=message):
        check_source(config_of(scored / "*.tar", keep))


def test_a_keep_needs_an_index_with_columns(tmp_path):
    write_scored(tmp_path, [5, 6])
    config = config_of(f"{tmp_path}/s0.tar::{tmp_path}/s1.tar", "clip_score > 0 and json['wid th']")
    command = (
        f"run `clip-train index {tmp_path}/s0.tar {tmp_path}/s1.tar --columns "
        "'json.clip_score,json.wid th'`"
    )
    with pytest.raises(UserError) as error:
        check_source(config)
    assert "2 of 2 shards have no index" in str(error.value) and command in str(error.value)
    index(tmp_path, columns=())
    with pytest.raises(UserError) as error:
        check_source(config)
    assert "has no column clip_score; it has no columns" in str(error.value)
    assert command in str(error.value)
    recipe = {"run": {"steps": 1}, "data": {"train": "a", "keep": "a > 1", "verify": "off"}}
    with pytest.raises(UserError, match=r"data\.verify=off leaves it alone"):
        check_config(recipe, "recipe")


def test_each_source_with_a_weight_needs_a_kept_sample(scored):
    train = f"{scored}/s0.tar::{scored}/s2.tar"
    keep = f"not uid == '{uid(133)}'"  # the one sample of s2.tar
    assert check_source(config_of(train, keep)).index.num_samples == 130
    weighted = config_of(train, keep, train_weights=[1, 1])
    with pytest.raises(UserError, match=r"keeps no sample of the source .*s2\.tar of data\.train"):
        check_source(weighted)
    with pytest.raises(
        UserError, match=r"found no samples that data\.keep .* keeps in the 1 shards"
    ):
        loader_of(weighted)


def test_the_first_look_is_at_kept_samples(tmp_path):
    """The others have no caption, which training never meets."""

    def described(key: str, caption: str, score: float) -> list[tuple[str, bytes]]:
        fields = {"clip_score": score, "text": caption}
        return [(f"{key}.jpg", jpeg(0)), (f"{key}.json", json.dumps(fields).encode())]

    for shard in range(3):
        write_shard(tmp_path / f"{shard}.tar", described("a", "", 0.1))
    members = []
    for i in range(70):
        members += described(f"b{i}", "", 0.1)
    for i in range(9):
        members += described(f"c{i}", "x" * (i + 1), 0.9) + described(f"d{i}", "", 0.1)
    write_shard(tmp_path / "3.tar", members)
    paths = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    indexed = index_shards(paths, workers=1, columns=["clip_score"], caption_key="text")
    write_indexes(indexed)
    found = check_source(config_of(tmp_path / "*.tar", "clip_score > 0.5", caption_key="text"))
    assert (found.first_key, found.first_caption, found.caption_characters) == ("c0", "x", 5)
    with pytest.raises(UserError, match=r"that data\.keep leaves out: the first sample, c0, can"):
        check_source(config_of(tmp_path / "*.tar", "clip_score > 0.5", caption_key="none"))


def test_an_index_of_somebody_else_leads_to_no_other_file(tmp_path):
    write_scored(tmp_path / "data", [5])
    index(tmp_path / "data", ("width",))
    (column,) = (tmp_path / "data").glob("*.npy")
    precious = tmp_path / "precious.npy"
    precious.write_bytes(column.read_bytes())
    file = tmp_path / "data" / INDEX_NAME
    file.write_bytes(file.read_bytes().replace(column.name.encode(), b"../precious.npy"))
    with pytest.raises(UserError, match=r"is damaged \(the file of its column width is '\.\./"):
        check_source(config_of(tmp_path / "data" / "*.tar", "width > 0"))
    assert main(["index", str(tmp_path / "data" / "*.tar"), "--workers", "1"]) == 2
    assert precious.exists()


# -- lists of uids


def write_list(path: Path, uids: list[str], dtype: str = "u8,u8") -> str:
    """As DataComp's README does."""
    pairs = [(int(u[:16], 16), int(u[16:32], 16)) for u in uids]
    processed = np.array(pairs, np.dtype(dtype))
    processed.sort()
    np.save(path, processed)
    return str(path)


def test_a_list_of_uids_keeps_its_samples(scored, tmp_path):
    """Those of the list that are here, once each; some agree in half of their uid with others."""
    samples = samples_in(scored)
    draw = random.Random(4)
    wanted = [uid(n) for n in draw.sample(range(900), 300)]
    expected = {key for key, row in samples.items() if row.get("uid") in wanted}
    keep = write_list(tmp_path / "keep.npy", [*wanted, *wanted[:50], "0" * 32])
    with loader_of(config_of(scored / "*.tar", keep), global_size=1) as loader:
        assert loader.index.num_samples == len(expected)
        assert sorted(next(loader).keys[0] for _ in expected) == sorted(expected)
    unsorted = np.load(keep)
    np.random.default_rng(1).shuffle(unsorted)
    np.save(tmp_path / "moved.npy", unsorted)
    moved = config_of(scored / "*.tar", str(tmp_path / "moved.npy"))
    found = index_of(moved.train, "auto", StorageConfig(), keep=moved.kept)
    assert (found.kept, list(found.places)) == (loader.index.kept, list(loader.index.places))


@pytest.mark.parametrize("spread", ["evenly", "low", "equal"])
def test_any_uids_are_found(tmp_path, spread):
    """Hashes; numbers whose first half is small, or the same for all."""
    draw = random.Random(spread)
    most = {"evenly": 2**64, "low": 2**20, "equal": 1}[spread]
    pool = [f"{draw.randrange(most):016x}{draw.randrange(1, 2**64):016x}" for _ in range(3000)]
    wanted = pool[::3] + [f"{draw.randrange(most):016x}{n:016x}" for n in range(1, 500)]
    members = []
    for number, text in enumerate(pool):
        fields = json.dumps({"uid": text}).encode()
        members += [(f"k{number}.jpg", b""), (f"k{number}.json", fields)]
    write_shard(tmp_path / "0.tar", members)
    index(tmp_path, ("uid",))
    config = config_of(tmp_path / "*.tar", write_list(tmp_path / "keep.npy", wanted))
    found = index_of(config.train, "auto", StorageConfig(), keep=config.kept)
    bits = np.unpackbits(np.frombuffer(found.shard(0).kept, np.uint8))
    assert np.flatnonzero(bits).tolist() == list(range(0, 3000, 3))


@pytest.mark.parametrize(
    "content, message",
    [
        (np.zeros(3, np.float32), r"has dtype float32 and shape \(3,\); a list of uids is"),
        (np.zeros(3, "u8,u4"), r"has dtype .*; a list of uids is"),
        (np.zeros((3, 1), "u8,u8"), r"has dtype .* and shape \(3, 1\)"),
        (np.array(["a", None], object), r"is not an array of numpy .*Python objects"),
        (np.zeros(0, "u8,u8"), r"is empty"),
        (np.ones(2, "u8,u8"), r"keeps none of the 414 samples of data\.train; correct it"),
        (b"no array", r"is not an array of numpy"),
        (b"", r"is not an array of numpy"),
        (None, r"cannot be read: FileNotFoundError"),
    ],
)
def test_a_list_that_is_none_is_explained(scored, tmp_path, content, message):
    path = tmp_path / "keep.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(UserError, match=rf"data\.keep \(.*keep\.npy\) {message}"):
        check_source(config_of(scored / "*.tar", str(path)))


def test_a_list_needs_uids_in_the_index(tmp_path):
    members = [m for i in range(3) for m in sample(f"k{i}", i)] + [("k3.json", b'{"uid": "short"}')]
    write_shard(tmp_path / "0.tar", members)
    index(tmp_path, ("uid",))
    keep = write_list(tmp_path / "keep.npy", [uid(1)])
    with pytest.raises(UserError, match=r"column uid of the index has \|S5, and not uids"):
        check_source(config_of(tmp_path / "*.tar", keep))


def test_a_place_of_a_list_may_have_variables(monkeypatch):
    monkeypatch.setenv("LISTS", "/lists")
    assert DataConfig(train="a", keep="$LISTS/x.npy").keep == "/lists/x.npy"
    assert DataConfig(train="a", keep="a == '$LISTS'").keep == "a == '$LISTS'"


def test_a_remote_list_and_remote_columns(scored, tmp_path):
    remote = fsspec.filesystem("memory")
    remote.put(f"{scored}/", "/scored", recursive=True)
    remote.put(write_list(tmp_path / "k.npy", [uid(n) for n in range(50)]), "/lists/k.npy")
    near = config_of(scored / "*.tar", str(tmp_path / "k.npy"))
    far = config_of("memory://scored/*.tar", "memory://lists/k.npy")
    found = [index_of(each.train, "auto", StorageConfig(), keep=each.kept) for each in (near, far)]
    assert found[0].kept == found[1].kept and found[0].places == found[1].places
    assert keys_of(near, 4) == keys_of(far, 4)
    remote.rm("/scored", recursive=True)


# -- the order

KEEP = "clip_score > 0.28 and not lang == 'de'"


def kept_keys(folder: Path) -> set[str]:
    return {
        key
        for key, row in samples_in(folder).items()
        if has(row, "clip_score") and row["clip_score"] > 0.28 and row.get("lang") != "de"
    }


@pytest.mark.parametrize("streams, global_size", [(1, 48), (8, 48), (64, 37), (300, 300)])
def test_every_epoch_holds_each_kept_sample_once(scored, streams, global_size):
    expected = kept_keys(scored)
    E = len(expected)
    steps = -(-2 * E // global_size)
    config = config_of(scored / "*.tar", KEEP, lanes=streams)
    keys, invalid = keys_of(config, steps, global_size=global_size)
    by_stream: dict[int, list[str]] = {stream: [] for stream in range(streams)}
    position = 0
    for batch in keys:
        positions = sorted(range(position, position + len(batch)), key=lambda p: (p % streams, p))
        for p, key in zip(positions, batch, strict=True):
            by_stream[p % streams].append(key)
        position += len(batch)
    stream = [by_stream[p % streams][p // streams] for p in range(2 * E)]
    for epoch in range(2):
        assert collections.Counter(stream[epoch * E : (epoch + 1) * E]) == dict.fromkeys(
            expected, 1
        )
    assert stream[:E] != stream[E:] and not invalid


def test_the_order_is_that_of_shards_with_these_samples_alone(scored, tmp_path):
    """As if the shards were written again: the same keys at the same places."""
    expected = kept_keys(scored)
    for path in scored.glob("*.tar"):
        with tarfile.open(path) as tar:
            members = [
                (member.name, tar.extractfile(member).read())  # type: ignore[union-attr]
                for member in tar.getmembers()
                if member.name.partition(".")[0] in expected
            ]
        write_shard(tmp_path / path.name, members)
    for streams in (1, 7, 64):
        kept = config_of(scored / "*.tar", KEEP, lanes=streams)
        written = config_of(tmp_path / "*.tar", None, lanes=streams)
        assert keys_of(kept, 30)[0] == keys_of(written, 30)[0]


@pytest.fixture(scope="module")
def whole(scored) -> dict[int, list[list[str]]]:
    """streams -> the keys of each step of a run that nothing stops."""
    return {
        streams: keys_of(config_of(scored / "*.tar", KEEP, lanes=streams), 40)[0]
        for streams in (1, 7, 64)
    }


@pytest.mark.parametrize("streams, layout", pairwise((1, 7, 64), ((1, 3), (2, 0), (4, 1))))
def test_a_run_with_a_keep_resumes_at_any_step(scored, whole, streams, layout):
    stop, (ranks, workers) = random.Random(f"{streams} {layout}").randrange(1, 35), layout
    config = config_of(scored / "*.tar", KEEP, lanes=streams, workers=workers)
    assert keys_of(config, 5, ranks, step=stop)[0] == whole[streams][stop : stop + 5]


def test_images_are_those_of_the_kept_samples(scored):
    """Members of others are not read, and none is mistaken for another's."""
    expected = {}
    number = 0
    for shard, size in enumerate(SIZES):
        for i in range(size):
            expected[f"s{shard}n{i}"] = f"caption {number}"
            number += 1

    class Words:
        def __call__(self, texts: list[str]):
            import torch

            return torch.tensor([[int(text.split()[1])] * 8 for text in texts])

    arguments: dict[str, Any] = {"image_size": 24, "context_length": 8, "seed": 5}
    config = config_of(scored / "*.tar", KEEP, aug_scale=(1, 1), aug_ratio=(1, 1))
    with TrainLoader(config, global_size=16, tokenizer=Words(), **arguments) as loader:
        for _ in range(9):
            batch = next(loader)
            assert not batch.bad_samples
            for key, text in zip(batch.keys, batch.texts[:, 0].tolist(), strict=True):
                assert expected[key] == f"caption {text}"


def test_invalid_samples_are_replaced_by_kept_ones(tmp_path):
    write_scored(tmp_path, [60])
    members = [(f"bad{i}.jpg", b"x") for i in range(9)]
    fields = json.dumps({"clip_score": 0.9}).encode()
    for i in range(9):
        members = [m for m in members if m[0] != f"bad{i}.jpg"]
        members += [(f"bad{i}.jpg", jpeg(1)), (f"bad{i}.json", fields)]
    write_shard(tmp_path / "z.tar", members)
    index(tmp_path)
    expected = kept_keys(tmp_path)
    good = {key for key in expected if not key.startswith("bad")}
    config = config_of(tmp_path / "*.tar", KEEP, lanes=1, bad_sample_limit=1.0)
    with loader_of(config, global_size=len(expected)) as loader:
        batch = next(loader)
    assert sum(batch.bad_samples.values()) == 9 and set(batch.keys) == good


def test_damage_behind_the_last_kept_sample_is_not_met(tmp_path):
    """And in front of it, the samples behind count as invalid."""
    write_scored(tmp_path, [30])
    path = tmp_path / "s0.tar"
    content = path.read_bytes()
    with tarfile.open(path) as tar:
        offsets = {member.name: member.offset for member in tar.getmembers()}
    uids = [uid(n) for n in range(30)]
    index(tmp_path)
    damaged = bytearray(content)
    damaged[offsets["s0n21.jpg"]] ^= 1  # a header
    path.write_bytes(damaged)
    settings = {"lanes": 1, "shuffle_block": 64, "bad_sample_limit": 1.0}
    early = config_of(path, write_list(tmp_path / "early.npy", uids[:20]), **settings)
    late = config_of(path, write_list(tmp_path / "late.npy", uids[10:25]), **settings)
    assert not keys_of(early, 3, global_size=20)[1]
    keys, invalid = keys_of(late, 1, global_size=15)
    assert sum(invalid.values()) == 5 and set(keys[0]) == {f"s0n{i}" for i in range(10, 20)}


# -- resuming


def state_of(config: DataConfig) -> dict[str, Any]:
    with loader_of(config) as loader:
        next(loader)
        return json.loads(json.dumps({"step": 1, **loader.state()}))


def resumed(state: dict[str, Any], config: DataConfig, changed: bool = False) -> Any:
    with loader_of(config) as loader:
        return resume_data(
            state,
            loader.index,
            loader.state()["order"],
            allow_changed_shards=config.allow_changed_shards,
            allow_changed_order=changed,
        )


def test_another_keep_is_refused_unless_it_is_allowed(scored, tmp_path):
    state = state_of(config_of(scored / "*.tar", KEEP))
    again = config_of(scored / "*.tar", f" {KEEP.replace(chr(39), chr(34))} ".replace(">", " > "))
    assert resumed(state, again).order_start == 0
    other = config_of(scored / "*.tar", "clip_score > 0.3")
    with pytest.raises(UserError, match=r"data\.keep was clip_score > 0\.28 and .*, is clip_score"):
        resumed(state, other)
    with pytest.raises(UserError, match=r"data\.keep was clip_score .*, is None"):
        resumed(state, config_of(scored / "*.tar", None))
    assert resumed(state, other, changed=True).order_start == 1
    # a state of an earlier version
    del (plain := state_of(config_of(scored / "*.tar", None)))["order"]["data.keep"]
    del plain["order"]["data.train_weights_schedule"]
    assert resumed(plain, config_of(scored / "*.tar", None)).order_start == 0
    with pytest.raises(UserError, match=r"data\.keep was None, is clip_score > 0\.3"):
        resumed(plain, other)


def test_a_list_is_known_by_its_content(scored, tmp_path):
    uids = [uid(n) for n in range(100)]
    state = state_of(config_of(scored / "*.tar", write_list(tmp_path / "a.npy", uids)))
    moved = config_of(scored / "*.tar", write_list(tmp_path / "b.npy", uids))
    assert resumed(state, moved).order_start == 0
    changed = config_of(scored / "*.tar", write_list(tmp_path / "a.npy", [*uids[:99], uid(101)]))
    with pytest.raises(UserError, match=r"data\.keep was 100 uids, sha256 \w{16}, is 100 uids"):
        resumed(state, changed)


# -- the columns of an index


def column_values(folder: Path, name: str) -> list[Any]:
    """Of all shards in the order of their names, as an independent reader of the files finds them."""
    head = json.loads((folder / INDEX_NAME).read_text())
    return np.load(folder / head["columns"][name]["file"], allow_pickle=False).tolist()


def test_columns_are_what_json_says(scored):
    samples = samples_in(scored)
    shards = sorted(range(len(SIZES)), key=lambda shard: f"s{shard}.tar")
    rows = [samples[f"s{shard}n{i}"] for shard in shards for i in range(SIZES[shard])]
    scores = column_values(scored, "clip_score")
    for found, row in zip(scores, rows, strict=True):
        assert found == row["clip_score"] if "clip_score" in row else math.isnan(found)
    langs = column_values(scored, "lang")
    assert langs == [(row.get("lang") or "").strip().encode() for row in rows]
    for found, row in zip(column_values(scored, "uid"), rows, strict=True):
        assert f"{found[0]:016x}{found[1]:016x}" == (row.get("uid") or "0" * 32)


def test_an_index_without_columns_is_the_one_of_before(scored, tmp_path):
    """Earlier versions read one with columns as well: its lines are the same."""
    write_scored(tmp_path, SIZES)
    index(tmp_path, columns=())
    plain = (tmp_path / INDEX_NAME).read_bytes()
    assert b"columns" not in plain
    rich = (scored / INDEX_NAME).read_bytes()
    assert parse(plain) == parse(rich) and plain.splitlines()[1:] == rich.splitlines()[1:]
    assert not list(tmp_path.glob("*.npy"))


def test_columns_grow_with_the_index(tmp_path):
    """New shards get the columns that are there; a column that is added covers the shards that were read."""
    write_scored(tmp_path, [5, 6])
    index(tmp_path, ("clip_score",))
    before = list(tmp_path.glob("*.npy"))
    write_scored(tmp_path, [7], first=500, prefix="t")
    assert main(["index", str(tmp_path / "t0.tar"), "--workers", "1"]) == 0
    assert len(column_values(tmp_path, "clip_score")) == 18
    assert list(tmp_path.glob("*.npy")) != before and len(list(tmp_path.glob("*.npy"))) == 1
    line = ["index", str(tmp_path / "s0.tar"), "--workers", "1", "--columns", "json.width"]
    assert main(line) == 0
    assert len(column_values(tmp_path, "width")) == 5
    found = check_source(config_of(tmp_path / "s0.tar", "width > 0 or not width > 0"))
    assert found.index.num_samples == 5
    with pytest.raises(UserError, match=r"2 shards in .* have no column width .*first is s1\.tar"):
        check_source(config_of(tmp_path / "*.tar", "width > 0"))
    assert main(["index", str(tmp_path / "*.tar"), "--workers", "1"]) == 0
    whole = samples_in(tmp_path)
    kept = check_source(config_of(tmp_path / "*.tar", "width > 9000")).index.num_samples
    assert kept == sum(row.get("width", 0) > 9000 for row in whole.values())


def test_a_shard_that_changed_has_no_old_values(tmp_path):
    write_scored(tmp_path, [5, 6])
    index(tmp_path, ("width",))
    write_scored(tmp_path / "new", [5, 6], first=300)
    (tmp_path / "new" / "s0.tar").rename(tmp_path / "s0.tar")
    index(tmp_path, (), "s0.tar")  # without the command, which would read the column again
    assert len(column_values(tmp_path, "width")) == 6
    with pytest.raises(UserError, match=r"1 shards in .* first is s0\.tar"):
        check_source(config_of(tmp_path / "s*.tar", "width > 0"))


def test_a_column_that_stays_behind_is_no_failure(tmp_path, monkeypatch, capsys):
    """As in a store that lets this user write but not delete: the index has been written."""
    for name in ("a", "b"):
        write_scored(tmp_path / name, [5])
        index(tmp_path / name, ("width",))
        write_scored(tmp_path / name, [6], first=300)
    (old,) = (tmp_path / "a").glob("*.npy")

    unlink = Path.unlink

    def denied(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".npy":
            raise PermissionError(f"no right to delete {path}")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", denied)
    assert main(["index", f"{tmp_path}/a/*.tar", f"{tmp_path}/b/*.tar", "--workers", "1"]) == 0
    assert f"warning: {old} is not used any more, and cannot be removed" in capsys.readouterr().err
    for name in ("a", "b"):
        assert len(parse((tmp_path / name / INDEX_NAME).read_bytes())) == 1
        found = check_source(config_of(tmp_path / name / "*.tar", "width > 0 or not width > 0"))
        assert found.index.num_samples == 6


@pytest.mark.parametrize(
    "first, second, merged",
    [
        ([1, 2], [3.5, None], [1.0, 2.0, 3.5, math.nan]),
        ([1, 70_000], [-5, 3], [1, 70_000, -5, 3]),
        ([None, None], ["a", ""], [b"", b"", b"a", b""]),
        ([1, 2.5], ["a", None], [b"1", b"2.5", b"a", b""]),
        ([uid(1), uid(2)], ["a", None], [uid(1).encode(), uid(2).encode(), b"a", b""]),
        ([uid(1), None], [None, None], [(int(uid(1)[:16], 16), 2 * 7919), (0, 0), (0, 0), (0, 0)]),
        ([[3], True], [{"a": 1}, [1, 2]], [3.0, 1.0, math.nan, math.nan]),
        ([2**70, 1], [1, 1], [2.0**70, 1.0, 1.0, 1.0]),
        (["\ud800x", "é"], ["z", "y"], [b"\xed\xa0\x80x", "é".encode(), b"z", b"y"]),
    ],
)
def test_values_of_shards_are_joined(tmp_path, first, second, merged):
    for name, values in (("a", first), ("b", second)):
        members = []
        for i, value in enumerate(values):
            members += [
                *sample(f"{name}{i}", i),
                (f"{name}{i}.json", json.dumps({"x": value}).encode()),
            ]
        write_shard(tmp_path / f"{name}.tar", members)
    index(tmp_path, ("x",))
    found = column_values(tmp_path, "x")
    assert repr(found) == repr(merged)


def test_a_damaged_or_missing_column_is_told(scored, tmp_path, capsys):
    write_scored(tmp_path, [5, 6])
    index(tmp_path, ("width",))
    train = str(tmp_path / "*.tar")
    assert main(["index", train, "--check", "--workers", "1"]) == 0
    (path,) = tmp_path.glob("*.npy")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"column width of the index, .* is damaged: .*--columns"):
        check_source(config_of(train, "width > 0"))
    assert main(["index", train, "--check", "--workers", "1"]) == 2
    assert "column width of the index" in capsys.readouterr().err
    path.unlink()
    with pytest.raises(UserError, match=r"is missing: copy it with the index"):
        check_source(config_of(train, "width > 0"))
    assert check_source(config_of(train, None)).index.num_samples == 11  # it needs none


def test_the_command_says_what_a_column_has(scored, tmp_path, capsys):
    write_scored(tmp_path, [60])
    line = ["index", str(tmp_path / "*.tar"), "--workers", "1", "--columns"]
    assert main([*line, "json.clip_score,uid,json.lang"]) == 0
    out = capsys.readouterr().out
    rows = samples_in(tmp_path).values()
    numbers = [row["clip_score"] for row in rows if "clip_score" in row]
    assert (
        f"column clip_score: numbers of {len(numbers)} of 60 samples, {min(numbers):g} to "
        f"{max(numbers):g}" in out
    )
    assert "column uid: uids of 59 of 60 samples" in out
    assert f"column lang: texts of {sum('lang' in row for row in rows)} of 60 samples" in out
    assert main([*line, "json.clip_scor"]) == 2
    err = capsys.readouterr().err
    assert "none of the first 1000 samples" in err and "did you mean json.clip_score?" in err
    write_shard(
        tmp_path / "long.tar", [*sample("k", 1), ("k.json", json.dumps({"x": "y" * 300}).encode())]
    )
    with pytest.raises(DataError, match=r"--columns json\.x: a text has 300 bytes"):
        index(tmp_path, ("x",), "long.tar")


def test_epochs_count_the_kept_samples(scored, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"run: {{epochs: 3}}\ndata: {{train: '{scored}/*.tar', keep: \"{KEEP}\"}}\n"
        "batch: {global_size: 4}\nschedule: {warmup_steps: 1}\n"
    )
    config = with_samples(load_config(str(recipe)))
    E = len(kept_keys(scored))
    assert config.data.num_samples == E and config.steps == round(3 * E / 4)


def test_the_bits_take_little_memory_in_workers(scored):
    """A process unpacks those of the shards that it reads."""
    config = config_of(scored / "*.tar", KEEP)
    found = index_of(config.train, "auto", StorageConfig(), keep=config.kept)
    bits = [found.shard(number).kept for number in range(len(SIZES))]
    assert [len(each) for each in bits] == [-(-size // 8) for size in SIZES]
    again = ShardIndex.opened(found.shared.address)
    assert again.kept == found.kept and list(again.places) == list(found.places)
    assert array("I", again.places) == array("I", found.places)
