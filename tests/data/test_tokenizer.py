"""The tokenizer against ids that OpenCLIP 3.3.0's SimpleTokenizer gave for the same captions."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from clip_train.data.tokenizer import Tokenizer

GOLDEN = json.loads(Path(__file__).with_name("tokenizer_golden.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(77)


@pytest.mark.parametrize("entry", GOLDEN, ids=lambda e: ascii(e["caption"])[:30])
def test_equals_openclip(tokenizer, entry):
    expected = torch.zeros(1, 77, dtype=torch.int64)
    expected[0, : len(entry["ids"])] = torch.tensor(entry["ids"])
    assert torch.equal(tokenizer([entry["caption"]]), expected)


def test_golden_is_hostile_enough():
    captions = "".join(e["caption"] for e in GOLDEN)
    assert len(GOLDEN) >= 40
    for needle in ("&amp;", "\x0b", "\x1c", "😀", "<end_of_text>", "â€œ", "中文"):
        assert needle in captions
    assert any(len(e["ids"]) == 77 for e in GOLDEN)


def test_truncation_ends_with_the_end_token():
    short = Tokenizer(8)
    ids = short(["one two three four five six seven eight nine", "one"])
    assert ids.shape == (2, 8) and ids.dtype == torch.int64
    assert ids[0, 0] == 49406 and ids[0, 7] == 49407
    assert ids[1].tolist() == [49406, 637, 49407, 0, 0, 0, 0, 0]
    full = Tokenizer(77)(["one two three four five six seven eight nine"])
    assert torch.equal(ids[0, :7], full[0, :7])


def test_one_caption_and_none():
    assert Tokenizer(5)("a cat").shape == (1, 5)
    assert Tokenizer(5)([]).shape == (0, 5)


def test_travels_to_a_worker(tokenizer):
    twin = pickle.loads(pickle.dumps(tokenizer))
    assert torch.equal(twin(["a dog"]), tokenizer(["a dog"]))
