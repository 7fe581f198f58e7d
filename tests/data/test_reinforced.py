"""Samples of reinforced shards: stored augmentations, synthetic captions, teachers' features."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from clip_train.data import decode
from clip_train.data.config import DataConfig, check_source
from clip_train.data.images import TrainTransform
from clip_train.data.invalid import InvalidSample
from clip_train.data.loader import TrainLoader
from clip_train.data.tokenizer import Tokenizer
from clip_train.errors import UserError
from tests.data.shards import write_shard

A, S, WIDTH, SIZE = 3, 2, 4, 8
BOXES = [
    (0, 0, 8, 8),
    (4, 2, 8, 8),
    (8, 8, 8, 8),
]  # top, left, height, width: of S pixels, so that nothing is resized


def npz(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def members(number: int) -> dict[str, bytes]:
    """A sample whose features say of which image, augmentation and text they are."""
    pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    image = np.array([[number, place, 0, 1] for place in range(A)], dtype=np.float32)
    text = np.array([[number, place, 0, 2] for place in range(1 + S)], dtype=np.float32)
    return {
        "png": buffer.getvalue(),
        "txt": f"caption {number}".encode(),
        "syn.json": json.dumps({"syn_text": [f"of {number}, {i}" for i in range(S)]}).encode(),
        "paug.json": json.dumps({"param_aug": json.dumps([[box, None] for box in BOXES])}).encode(),
        "npz": npz(image_emb=image, text_emb=text),
    }


def test_features_match_the_chosen_augmentation_and_caption(tmp_path):
    samples = {f"s{number}": members(number) for number in range(12)}
    named = [(f"{key}.{ext}", data) for key, each in samples.items() for ext, data in each.items()]
    shard = write_shard(tmp_path / "0.tar", named)
    config = DataConfig(
        train=str(shard), workers=0, reinforced=[1, 3], caption_key={"txt": 1.0, "syn.json": 1.0}
    )
    seen, first = set(), None
    own = {"image_size": SIZE, "context_length": 8, "global_size": 6, "seed": 1}
    with TrainLoader(config, **own) as loader:
        for batch in (next(loader) for _ in range(8)):
            features = batch.columns["teacher_features"]
            assert features.shape == (6, 2 * WIDTH)
            first = first or batch
            for row, key in enumerate(batch.keys):
                number, place, _, kind = features[row, :WIDTH].tolist()
                of_text, text, _, other = features[row, WIDTH:].tolist()
                assert f"s{number:.0f}" == f"s{of_text:.0f}" == key and (kind, other) == (1, 2)
                top, left, *_ = BOXES[int(place)]
                whole = np.array(Image.open(io.BytesIO(samples[key]["png"])))
                cut = whole[top : top + SIZE, left : left + SIZE]
                assert (batch.images[row].permute(1, 2, 0).numpy() == cut).all()
                texts = [f"caption {number:.0f}", *(f"of {number:.0f}, {i}" for i in range(S))]
                tokens = Tokenizer(8)([texts[int(text)]])[0]
                assert torch.equal(batch.texts[row], tokens)
                seen.add((place, text))
    assert len(seen) == A * (1 + S)  # all of them
    unread = config.model_copy(update={"reinforced": []})  # the augmentations alone
    with TrainLoader(unread, **own) as loader:
        again = next(loader)
        assert "teacher_features" not in again.columns and torch.equal(again.images, first.images)


@pytest.mark.parametrize(
    "widths, said", [([3], "npz: not 3 finite"), ([9], "npz: not 9 finite"), ([4], "no features")]
)
def test_a_first_sample_without_such_features_is_refused(tmp_path, widths, said):
    left_out = "paug.json" if said == "no features" else ""
    named = [(f"s.{ext}", data) for ext, data in members(0).items() if ext != left_out]
    config = DataConfig(train=str(write_shard(tmp_path / "0.tar", named)), reinforced=widths)
    with pytest.raises(UserError, match=said.replace("no features", "paug.json: KeyError")):
        check_source(config)


def pixels_of(stored) -> np.ndarray:
    g = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=g)
    return image.numpy(), TrainTransform(16).stored(image, [[0, 0, 16, 16], stored]).numpy()


@pytest.mark.parametrize("operation", range(14))
def test_each_operation_of_rand_augment(operation):
    """By torchvision's definitions: y and x of a pixel, or its value."""
    m = {10: 3, 11: 128.5}.get(operation, 0.25 if operation < 3 or operation > 4 else 3.2)
    image, out = pixels_of([[operation, m]])
    y, x = np.mgrid[:16, :16]
    moves = {
        1: (y, np.floor(x + 0.5 + m * (y + 0.5)).astype(int)),
        2: (np.floor(y + 0.5 + m * (x + 0.5)).astype(int), x),
        3: (y, x - 3),
        4: (y - 3, x),
    }
    if operation in moves:
        rows, cols = moves[operation]
        inside = (rows >= 0) & (rows < 16) & (cols >= 0) & (cols < 16)
        wanted = np.where(inside, image[:, rows.clip(0, 15), cols.clip(0, 15)], 0)
    elif operation in (0, 5):  # a quarter of a degree turns no pixel of so small an image
        wanted = image
    elif operation == 6:
        wanted = np.clip(image * (1 + m), 0, 255).astype(np.uint8)
    elif operation == 10:
        wanted = image & 0b11100000
    elif operation == 11:
        wanted = np.where(image < m, image, 255 - image)
    else:
        assert (out != image).any() or operation == 12  # autocontrast of all levels
        return
    assert (out == wanted).all()


def bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("image_emb.npy", bytes(decode.MAX_FEATURE_BYTES + 1))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"npz": npz(image_emb=np.array([object()]), text_emb=np.zeros(1))}, InvalidSample, "npz: ValueError"),
        ({"npz": bomb()}, InvalidSample, "npz is too large"),
        ({"npz": npz(image_emb=np.ones((A, 3)), text_emb=np.ones((3, 3)))}, InvalidSample, "not 4 finite"),
        ({"npz": npz(image_emb=np.full((A, 4), np.nan), text_emb=np.ones((3, 4)))}, InvalidSample, "not 4 finite"),
        ({"npz": npz(image_emb=np.ones((A, 4)), text_emb=np.ones((2, 4)))}, InvalidSample, "features and texts differ"),
        ({"npz": None, "pth.gz": b"x"}, UserError, "a pickle, which can run any code"),
        ({"syn.json": b"[1"}, InvalidSample, "syn.json: JSONDecodeError"),
        ({"txt": b"another"}, InvalidSample, "npz: ValueError"),
    ],
)  # fmt: skip
def test_what_cannot_be_used(change, error, said):
    sample = {k: v for k, v in {**members(1), **change}.items() if v is not None}
    with pytest.raises(error, match=said):
        decode.stored_features(sample, 0, ["caption 1"], WIDTH)


def test_lists_of_texts_may_be_stored_in_any_order():
    """Each has the features of its own name, also beside a list that is none of texts."""
    texts = {"syn_text_b": ["b0", "b1"], "other": 1, "syn_text_a": ["a0"]}
    sample = {
        **members(1),
        "syn.json": json.dumps(texts).encode(),
        "npz": npz(
            image_emb=np.zeros((A, WIDTH)),
            text_emb=np.full((1, WIDTH), 1.0),
            syn_text_a_emb=np.full((1, WIDTH), 2.0),
            syn_text_b_emb=np.full((2, WIDTH), [[3.0], [4.0]]),
        ),
    }
    chosen = ["a0", "b1", "caption 1", "b0"]
    features = decode.stored_features(sample, 0, chosen, WIDTH).view(-1, WIDTH)
    assert features[:, 0].tolist() == [0.0, 2.0, 4.0, 1.0, 3.0]


@pytest.mark.parametrize("stored", [b"", b'{"param_aug": []}', b'{"param_aug": [[[9, 9, 8, 8]]]}'])
def test_a_misfit_augmentation_makes_the_sample_invalid(tmp_path, stored):
    named = [
        (f"s{number}.{ext}", stored if ext == "paug.json" and not number else data)
        for number in range(8)
        for ext, data in members(number).items()
    ]
    config = DataConfig(
        train=str(write_shard(tmp_path / "0.tar", named)), workers=0, reinforced=[WIDTH], bad_sample_limit=1, lanes=1
    )  # fmt: skip
    own = {"image_size": SIZE, "context_length": 8, "global_size": 8, "seed": 1}
    with TrainLoader(config, **own) as loader:
        (reason,) = next(loader).bad_samples
    assert reason.startswith("paug.json: "), reason
