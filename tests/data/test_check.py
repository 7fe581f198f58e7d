"""Every mistake about the data is named before the job starts."""

import json

import pytest

from clip_train.data.config import DataConfig, check_source
from clip_train.data.shards import expand
from clip_train.errors import RankError, UserError
from tests.data.shards import jpeg, sample, write_dataset, write_shard


def check(train, **settings):
    return check_source(DataConfig(train=str(train), **settings))


def test_good_data_is_summed_up(tmp_path):
    train = write_dataset(tmp_path, [2, 3])
    summary = check(train)
    assert (len(summary.index.shards), summary.first_key, summary.first_caption) == (
        2,
        "s0n0",
        "caption 0",
    )
    assert len(check(f"{tmp_path}/{{000..001}}.tar::{tmp_path}/001.tar").index.shards) == 3
    assert len(check(f"file://{tmp_path}/000.tar").index.shards) == 1


def test_order_of_shards(tmp_path):
    write_dataset(tmp_path, [1, 1, 1])
    sources = expand(f"{tmp_path}/{{002,000}}.tar::{tmp_path}/*.tar")
    names = [[path.rsplit("/", 1)[1] for path in source] for source in sources]
    assert names == [["002.tar", "000.tar"], ["000.tar", "001.tar", "002.tar"]]


@pytest.mark.parametrize(
    "train,message",
    [
        ("{folder}/none/*.tar", r"data\.train \(.*none/\*\.tar\).*matches no"),
        ("{folder}/{{000..005}}.tar", r"data\.train.*4 of 6 shards do not exist.*002\.tar"),
        ("{folder}/{{000..001.tar", r"data\.train.*braces"),
        ("pipe:cat {folder}/000.tar", r"data\.train.*pipe:.*shell"),
        ("{folder}/000.tar::pipe:curl x", r"pipe:"),
        ("a.tar::", r"data\.train.*empty"),
        ("{folder}/pairs.csv", r"data\.train \(.*pairs\.csv\) is a table, not shards.*img2dataset"),
        ("{folder}/000.tar::", r"empty part"),
        ("nosuch://bucket/000.tar", r"nosuch"),
    ],
)
def test_shards_that_are_not_there(tmp_path, train, message):
    write_dataset(tmp_path, [1, 1])
    with pytest.raises(UserError, match=message):
        check(train.format(folder=tmp_path))


META = json.dumps({"text": "a cat", "url": "x", "number": 3}).encode()


@pytest.mark.parametrize(
    "members,settings,message",
    [
        ([("a.txt", b"x"), ("a.npy", b"y")], {}, r"first sample, a, .*no image.*\.txt, \.npy"),
        ([("a.jpg", b""), ("a.txt", b"y")], {}, r"image is empty"),
        ([("a.jpg", jpeg(0)), ("a.cls", b"3")], {}, r"no caption.*\.jpg, \.cls.*\.txt"),
        (
            [("a.jpg", jpeg(0)), ("a.json", META)],
            {},
            r"no caption.*data\.caption_key.*text, url, number",
        ),
        (
            [("a.jpg", jpeg(0)), ("a.json", META)],
            {"caption_key": "caption"},
            r"no caption.*caption_key \(now caption\).*text, url",
        ),
        (
            [("a.jpg", jpeg(0)), ("a.json", META)],
            {"caption_key": "number"},
            r"caption is not a text",
        ),
        ([("a.jpg", jpeg(0)), ("a.json", b"{")], {"caption_key": "text"}, r"json does not parse"),
        (
            sample("a", 0),
            {"caption_key": "text"},
            r"no caption.*\.jpg, \.txt.*set data\.caption_key \(now text\)",
        ),
        ([("a.jpg", jpeg(0)), ("a.txt", b"  ")], {}, r"caption is empty"),
        ([("a.1.jpg", b"x"), ("a.2.jpg", b"x"), ("a.1.jpg", b"x")], {}, r"first dot"),
        ([("README", b"x")], {}, r"holds no sample"),
    ],
)
def test_first_sample_is_looked_at(tmp_path, members, settings, message):
    write_shard(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match=message) as caught:
        check(tmp_path / "a.tar", **settings)
    assert "data.train" in str(caught.value)


def test_captions_from_json(tmp_path):
    write_shard(tmp_path / "a.tar", [("a.jpg", jpeg(0)), ("a.json", META)])
    assert check(tmp_path / "a.tar", caption_key="text").first_caption == "a cat"


def test_not_a_tar(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"<html>" * 500)
    with pytest.raises(UserError, match="cannot be read as a tar file"):
        check(tmp_path / "a.tar")
    (tmp_path / "empty.tar").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read as a tar file"):
        check(tmp_path / "empty.tar")


def test_one_damaged_shard_is_no_reason_not_to_start(tmp_path):
    (tmp_path / "0.tar").write_bytes(b"")
    write_shard(tmp_path / "1.tar", [("a.jpg", jpeg(0))])
    with pytest.raises(UserError, match=r"0\.tar.*cannot be read as a tar file"):
        check(tmp_path / "*.tar")
    write_shard(tmp_path / "2.tar", sample("b", 1))
    summary = check(tmp_path / "*.tar")
    assert (summary.first_key, len(summary.index.shards)) == ("b", 3)


def test_config_checks_itself():
    with pytest.raises(ValueError, match="aug_scale"):
        DataConfig(train="x", aug_scale=(0.9, 0.5))
    for bad in (
        {"workers": -1},
        {"lanes": 0},
        {"lanes": "many"},
        {"shuffle_block": 0},
        {"unknown": 1},
    ):
        with pytest.raises(ValueError):
            DataConfig(train="x", **bad)


def test_remote_urls_are_read_through_the_storage(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    from tests.data.shards import tar_bytes

    with fsspec.open("memory://shards/000.tar", "wb") as file:
        file.write(tar_bytes(sample("a", 0)))
    assert check("memory://shards/*.tar").first_key == "a"
    with pytest.raises(UserError, match="cannot be opened"):
        check("memory://shards/999.tar")


def test_a_folder_missing_on_one_node_is_not_a_recipe_mistake(tmp_path):
    """So a job tries again, perhaps elsewhere; a shard that is missing from its folder is one."""
    with pytest.raises(
        RankError,
        match=r"000000.tar, and its folder .*/unmounted does not exist either. .* mount it on \w",
    ):
        check_source(DataConfig(train=f"{tmp_path}/unmounted/{{000000..000005}}.tar"))
    with pytest.raises(UserError, match="6 of 6 shards do not exist") as e:
        check_source(DataConfig(train=f"{tmp_path}/{{000..005}}.tar"))
    assert not isinstance(e.value, RankError)


def test_a_pattern_missing_on_one_node_is_not_a_recipe_mistake(tmp_path):
    with pytest.raises(
        RankError, match=r"its folder .*/missing does not exist either. .* mount it on \w"
    ):
        check_source(DataConfig(train=f"{tmp_path}/missing/*.tar"))
    with pytest.raises(UserError, match="matches no shard") as found:
        check_source(DataConfig(train=f"{tmp_path}/*.tar"))
    assert not isinstance(found.value, RankError)


def test_a_disk_away_for_a_minute_is_not_a_recipe_mistake(tmp_path):
    (tmp_path / "0.tar").symlink_to("/proc/self/mem")  # an OSError: neither missing nor forbidden
    with pytest.raises(RankError, match=r"data\.train .* cannot be opened \(OSError"):
        check_source(DataConfig(train=f"{tmp_path}/0.tar", verify="off"))
