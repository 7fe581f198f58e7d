"""What a pattern matches on S3: all of it, or an error that names what could not be listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clip_train.data.index import INDEX_NAME, ShardEntry, to_bytes
from clip_train.data.shards import expand
from clip_train.errors import UserError
from clip_train.storage.blocks import Checksums, block_sum
from clip_train.storage.urls import expand_glob
from tests.launcher.conftest import clean_environment, finish
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy
from tests.warm import Command

KEYS = [
    "set/x/000.tar", "set/x/001.tar", "set/y/000.tar", "set/y/001.tar", "set/y/deep/000.tar", "set/z/a b+c.tar",
    "set/000.tar", "set/x.json", "set-2/x/000.tar", "set/[odd].tar", "top.tar",
]  # fmt: skip
PATTERNS = {
    "set/*/*.tar": [
        "set/x/000.tar",
        "set/x/001.tar",
        "set/y/000.tar",
        "set/y/001.tar",
        "set/z/a b+c.tar",
    ],
    "set/*.tar": ["set/000.tar", "set/[odd].tar"],
    "set/00*.tar": ["set/000.tar"],
    "set/[[]odd].tar": ["set/[odd].tar"],
    "set/*": ["set/000.tar", "set/[odd].tar", "set/x.json"],
    "set*/x/*.tar": ["set-2/x/000.tar", "set/x/000.tar", "set/x/001.tar"],
    "set/[xz]/*.tar": ["set/x/000.tar", "set/x/001.tar", "set/z/a b+c.tar"],
    "set/?/000.tar": ["set/x/000.tar", "set/y/000.tar"],
    "set/y/**": ["set/y/000.tar", "set/y/001.tar", "set/y/deep/000.tar"],
    "*/y/**/000.tar": ["set/y/000.tar", "set/y/deep/000.tar"],
    "*.tar": ["top.tar"],
}


@pytest.fixture
def tree(view: Bucket) -> Bucket:
    for key in [*KEYS, "set/", "set/y/"]:  # consoles make such objects for folders
        view.put(key, b"x")
    return view


def test_a_pattern_matches_objects(proxy: FaultyProxy, tree: Bucket) -> None:
    found = {pattern: expand_glob(f"{tree.url}/{pattern}") for pattern in PATTERNS}
    assert found == {
        pattern: [f"{tree.url}/{key}" for key in keys] for pattern, keys in PATTERNS.items()
    }


def test_a_pattern_is_one_listing_of_its_last_plain_folder(
    proxy: FaultyProxy, tree: Bucket
) -> None:
    expand_glob(f"{tree.url}/set/[xz]/0*.tar")
    assert [re.findall("prefix=([^&]*)", request) for request in proxy.requests] == [["set%2F"]]


def test_ranks_do_not_ask_what_an_epoch_has(
    proxy: FaultyProxy, view: Bucket, tmp_path: Path
) -> None:
    """Who starts them has asked; beside it the one rank asks that looks at the shards."""
    view.put("set/0.tar", b"x")
    entry = ShardEntry(8, "0" * 64, Checksums(1, 1, block_sum(b"x")))
    view.put(f"set/{INDEX_NAME}", to_bytes({"0.tar": entry}))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"{{run: {{epochs: 1}}, schedule: {{warmup_steps: 0}}, data: {{train: '{view.url}/set/*.tar'}}}}"
    )
    status, out = finish(
        Command(["train", str(recipe), "--ranks", "3"], env=clean_environment(), cwd=tmp_path)
    )
    assert status == 2 and "cannot be read as a tar file" in out, out
    asked = [each for each in proxy.requests if "GET" in each and INDEX_NAME in each]
    assert len(asked) == 2, proxy.requests


def test_more_than_a_page(proxy: FaultyProxy, tree: Bucket) -> None:
    proxy.faults = [Fault("pages", key="")]
    assert expand_glob(f"{tree.url}/set/y/**") == [
        f"{tree.url}/{key}" for key in PATTERNS["set/y/**"]
    ]
    assert proxy.fired == 2


ANSWERS = {"denied": (403, "AccessDenied"), "busy": (503, "SlowDown")}


@pytest.mark.parametrize("answer", ["denied", pytest.param("busy", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "query", ["prefix=set%2F", "continuation-token="], ids=["first page", "later page"]
)
@pytest.mark.parametrize("pattern", ["set/*/*.tar", "set/y/**", "set/?/000.tar"])
def test_what_cannot_be_listed_is_not_empty(
    proxy: FaultyProxy,
    tree: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    pattern: str,
    query: str,
    answer: str,
) -> None:
    """Neither is a part of it passed over."""
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "0")
    code, s3code = ANSWERS[answer]
    proxy.faults = [
        Fault("status", key="", query=query, code=code, s3code=s3code),
        Fault("pages", key=""),
    ]
    place = rf"{tree.url}/set(/y)?: listing: HTTP {code} {s3code}"
    with pytest.raises(UserError, match=rf"data\.train .*cannot be listed .*{place}"):
        expand(f"{tree.url}/{pattern}")
    assert proxy.faults[0].fired


def test_a_bucket_that_is_not_there_and_a_pattern_of_buckets(proxy: FaultyProxy) -> None:
    with pytest.raises(
        UserError, match=r"cannot be listed .*create the bucket, or correct the URL"
    ):
        expand("s3://nowhere-at-all/*.tar")
    with pytest.raises(UserError, match=r"name the bucket"):
        expand("s3://b*/x.tar")
