"""Which caption of a sample is trained on: names in order, names that are drawn, lists; whoever reads it, and when."""

from __future__ import annotations

import collections
import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from clip_train.data.config import DataConfig, check_source
from clip_train.data.decode import SEED_BOUND, captions, texts_of
from clip_train.data.invalid import InvalidSample
from clip_train.data.loader import TrainLoader
from clip_train.data.validation import ValLoader
from clip_train.errors import UserError
from tests.data.shards import counted, jpeg, write_shard

META = {
    "original": "an original",
    "synthetic": ["one", "two", "three"],
    "none": None,
    "number": 3,
    "empty": " ",
}
MEMBERS = {
    "jpg": b"x",
    "txt": b"the text",
    "caption": b"beside it",
    "json": json.dumps({**META, "txt": "in json"}).encode(),
}


@pytest.mark.parametrize(
    "key, expected",
    [
        (None, ["the text"]),
        ("txt", ["the text"]),
        ("json.txt", ["in json"]),
        ("caption", ["beside it"]),
        ("original", ["an original"]),
        ("json.original", ["an original"]),
        ("synthetic", ["one", "two", "three"]),
        (["caption", "txt"], ["beside it"]),
        (["nowhere", "none", "number", "empty", "synthetic", "txt"], ["one", "two", "three"]),
        ({"original": 1, "nowhere": 5, "synthetic": 2}, ["an original", "one", "two", "three"]),
    ],
)
def test_what_a_name_means(key, expected):
    assert [text for texts in captions(MEMBERS, key).values() for text in texts] == expected
    assert texts_of(MEMBERS, key)[0] == expected[0]


@pytest.mark.parametrize(
    "key, reason",
    [
        (["nowhere", "none"], "no caption"),
        (["nowhere", "number", "empty"], "caption is not a text"),
        ({"empty": 1, "nowhere": 1}, "caption is empty"),
    ],
)
def test_a_sample_without_any_has_the_first_reason(key, reason):
    with pytest.raises(InvalidSample, match=reason):
        captions(MEMBERS, key)


def test_a_broken_json_matters_where_it_is_needed():
    members = {**MEMBERS, "json": b"{"}
    for key in (["txt", "original"], {"original": 9, "txt": 1}):
        assert captions(members, key) == {"txt": ["the text"]}
    with pytest.raises(InvalidSample, match="json does not parse"):
        captions(members, ["nowhere", "original"])


def expected_name(weights: dict[str, float], there: set[str], seed: int) -> str:
    """By the definition: the seed's place in [0, 1) among the shares of those that are there."""
    names = [name for name in weights if name in there]
    whole = sum(Fraction(weights[name]) for name in names)
    part = Fraction(0)
    for name in names:
        part += Fraction(weights[name]) / whole
        if Fraction(seed, 2**63) < part:
            return name
    raise AssertionError("the shares do not add up")


WEIGHTS = {"alt": 0.25, "original": 0.25, "synthetic": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """60 samples: all have `original`, two of three `synthetic`, a list of three, and none `alt`. The words are numbers
    in the tokenizer below."""
    folder = tmp_path_factory.mktemp("captions")
    members = []
    for i in range(60):
        meta = {"original": f"0 {i} 0"} | (
            {"synthetic": [f"1 {i} {j}" for j in range(3)]} if i % 3 else {}
        )
        members += [(f"k{i}.jpg", jpeg(i)), (f"k{i}.json", json.dumps(meta).encode())]
    write_shard(folder / "0.tar", members[: len(members) // 2])
    write_shard(folder / "1.tar", members[len(members) // 2 :])
    return folder


def numbers(texts: list[str]) -> torch.Tensor:
    """A tokenizer: [n, 3], which name, which sample, which of its list."""
    return torch.tensor([[int(word) for word in text.split()] for text in texts])


def visits(
    folder: Path, steps: int, ranks: int = 1, workers: int = 0, step: int = 0
) -> list[list[list]]:
    """Per step, of all ranks in turn: (key, seed, the caption as numbers)."""
    config = DataConfig(
        train=f"{folder}/*.tar", caption_key=WEIGHTS, workers=workers, lanes=6, shuffle_block=5
    )
    loaders = [
        TrainLoader(
            config, image_size=8, context_length=3, global_size=24, seed=7, rank=rank, world_size=ranks, step=step,
            tokenizer=numbers, lengths=None,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    out = []
    for _ in range(steps):
        batches = [next(loader) for loader in loaders]
        rows = [
            zip(b.keys, b.sample_seeds.tolist(), b.texts.tolist(), strict=True) for b in batches
        ]
        out.append([list(row) for each in rows for row in each])
    for loader in loaders:
        loader.close()
    return out


@pytest.fixture(scope="module")
def reference(folder) -> list[list[list]]:
    return visits(folder, 60)


def test_each_visit_draws_by_the_samples_seed(reference):
    for key, seed, (name, sample, _) in (row for step in reference for row in step):
        there = {"original"} | ({"synthetic"} if int(key[1:]) % 3 else set())
        assert sample == int(key[1:]) and ["original", "synthetic"][name] == expected_name(
            WEIGHTS, there, seed
        )


def test_shares_are_those_of_the_names_that_a_sample_has(reference):
    rows = [(key, tuple(text)) for step in reference for key, _, text in step]
    both = collections.Counter((name, item) for key, (name, _, item) in rows if int(key[1:]) % 3)
    one = {name for key, (name, _, _) in rows if not int(key[1:]) % 3}
    total = sum(both.values())
    assert one == {0} and total > 900
    assert both[0, 0] / total == pytest.approx(1 / 3, abs=0.05)  # 0.25 of 0.75
    for item in range(3):  # of a list each is as likely, whichever name was drawn
        assert both[1, item] / total == pytest.approx(2 / 9, abs=0.05)


@pytest.mark.parametrize("ranks, workers, step", [(1, 2, 0), (3, 0, 0), (2, 1, 4)])
def test_ranks_workers_and_resumes_change_no_draw(folder, reference, ranks, workers, step):
    assert visits(folder, 6, ranks, workers, step) == reference[step : step + 6]


def test_validation_takes_all(folder):
    key = {"synthetic": 1.0, "original": 1.0}
    loader = ValLoader(
        counted(f"{folder}/*.tar"),
        image_size=8,
        context_length=3,
        batch_size=16,
        caption_key=key,
        tokenizer=numbers,
    )
    texts = torch.cat([batch.texts for batch in loader]).tolist()
    synthetic = [[[1, i, j] for j in range(3)] if i % 3 else [] for i in range(60)]
    assert texts == [text for i in range(60) for text in [*synthetic[i], [0, i, 0]]]


def test_the_check_before_a_run_goes_by_the_names(folder):
    check = lambda key: check_source(DataConfig(train=f"{folder}/*.tar", caption_key=key))  # noqa: E731
    assert check(["nowhere", "original"]).first_caption == "0 0 0"
    with pytest.raises(
        UserError, match=r"no caption.*\(now \[nowhere, txt\]\).*one of its keys: original"
    ):
        check(["nowhere", "txt"])


@pytest.mark.parametrize("key", [[], {}, [""], {"a": 0}, {"a": -1.0}, {"": 1}, 3, [1]])
def test_names_that_mean_nothing_are_refused(key):
    with pytest.raises(ValueError, match="caption_key"):
        DataConfig(train="x", caption_key=key)


def test_a_seed_is_below_the_draws(reference):
    assert all(0 <= seed < SEED_BOUND for step in reference for _, seed, _ in step)
