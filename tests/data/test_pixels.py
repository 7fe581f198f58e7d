"""One decoder for pixels: transparency, 16 bits, JPEGs with warnings; the same in every part."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from clip_tools.embed import Loaded
from clip_train.data.config import DataConfig
from clip_train.data.images import TrainTransform
from clip_train.data.invalid import InvalidSample
from clip_train.data.loader import TrainLoader
from clip_train.data.pixels import decode_image, is_transparent
from clip_train.data.tokenizer import Tokenizer
from clip_train.data.validation import ValLoader
from clip_train.errors import UserError
from clip_train.models.clip import build_model
from clip_train.models.config import load_architecture
from clip_train.resizing import Resize
from tests.data.shards import counted, jpeg, write_shard
from tests.peers.odd_images import odd_images
from tests.peers.pixels import evaluated_pixels

SIZE = 32
RNG = np.random.default_rng(5)
COLORS = RNG.integers(0, 256, (SIZE, SIZE, 4)).astype(np.uint8)
COLORS[:, :16, 3] = 0
GRAY16 = (RNG.integers(0, 1 << 16, (SIZE, SIZE))).astype(np.uint16)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def palette() -> bytes:
    image = Image.fromarray(COLORS[..., :3]).quantize(16)
    return encoded(image, transparency=bytes([0, 90, 255] + [255] * 13))


FILES = {
    "rgba.png": encoded(Image.fromarray(COLORS)),
    "rgba.webp": encoded(Image.fromarray(COLORS), "WEBP", lossless=True, exact=True),
    "gray-alpha.png": encoded(Image.fromarray(COLORS).convert("LA")),
    "palette.png": palette(),
    "gray.png": encoded(Image.fromarray(COLORS[..., 0]), transparency=int(COLORS[0, 0, 0])),
    "16-bit.png": encoded(Image.fromarray(GRAY16)),
    "16-bit-key.png": encoded(Image.fromarray(GRAY16), transparency=int(GRAY16[3, 4])),
    "photo.jpg": jpeg(1, 33),
}
WITH_ALPHA = [name for name in FILES if name not in ("16-bit.png", "photo.jpg")]


def over_white(name: str) -> np.ndarray:
    """[H, W, 3] as float64, by the definition of alpha, from Pillow's channels."""
    image = Image.open(io.BytesIO(FILES[name]))
    if name.startswith("16-bit"):
        gray = GRAY16 / 257.0
        if name == "16-bit-key.png":
            gray = np.where(GRAY16[3, 4] == GRAY16, 255.0, gray)
        return np.repeat(gray[..., None], 3, axis=2)
    pixels = np.asarray(image.convert("RGBA"), dtype=np.float64)
    a = pixels[..., 3:] / 255
    return pixels[..., :3] * a + 255 * (1 - a)


@pytest.mark.parametrize("name", [name for name in FILES if name != "photo.jpg"])
def test_transparent_pixels_are_blended_with_white(name):
    found = decode_image(FILES[name]).permute(1, 2, 0).numpy()
    assert np.abs(found - over_white(name)).max() <= 1


@pytest.mark.filterwarnings("ignore:Palette images")
@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("16-bit")])
def test_drop_is_what_openclip_does(name):
    """webdataset's "pilrgb" and OpenCLIP's own transform: Image.convert("RGB")."""
    found = decode_image(FILES[name], alpha="drop").permute(1, 2, 0).numpy()
    assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(FILES[name])).convert("RGB")))


def test_an_image_that_is_decoded_already_is_treated_alike():
    for alpha in ("white", "drop"):
        for content in FILES.values():
            image = Image.open(io.BytesIO(content))
            assert torch.equal(decode_image(image, alpha=alpha), decode_image(content, alpha=alpha))


@pytest.mark.parametrize("alpha", ["white", "drop"])
def test_python_sees_what_evaluation_sees(tmp_path, alpha):
    """load(...).images(), a validation set, and (by a crop of the whole image) training."""
    members = []
    for number, (name, content) in enumerate(FILES.items()):
        ending = name.rpartition(".")[2]
        members += [(f"{number}.{ending}", content), (f"{number}.txt", b"a text")]
    write_shard(tmp_path / "0.tar", members)
    index = counted(str(tmp_path / "0.tar"))
    loader = ValLoader(index, image_size=SIZE, context_length=16, batch_size=99, alpha=alpha)
    (batch,) = loader
    model = build_model(load_architecture("tiny")).eval().requires_grad_(False)
    loaded = Loaded(model, Tokenizer(16), SIZE, "a test", alpha)
    as_images = [Image.open(io.BytesIO(content)) for content in FILES.values()]
    seen = torch.stack([loaded.preprocess(image) for image in as_images])
    assert torch.equal(seen, batch.images)
    assert torch.equal(loaded.images([*FILES.values()]), loaded.pixels(batch.images))

    config = DataConfig(
        train=str(tmp_path / "0.tar"), workers=0, lanes=1, aug_scale=(1, 1), aug_ratio=(1, 1),
        alpha=alpha,
    )  # fmt: skip
    with TrainLoader(
        config, image_size=SIZE, context_length=16, global_size=len(FILES), seed=0
    ) as train:
        trained = next(train)
    for key, image in zip(trained.keys, trained.images, strict=True):
        if list(FILES)[int(key)] != "photo.jpg":  # of 33 pixels
            assert torch.equal(image, batch.images[int(key)]), key


@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
def test_200_odd_files_are_the_same_everywhere(tmp_path, mode):
    """In evaluation, `load` and `embed`, and (squashed without a crop) in training."""
    files, resize = list(odd_images()), Resize("bicubic", mode)
    seen = evaluated_pixels(files, tmp_path, resize, SIZE, "white")
    loaded = Loaded(nn.Identity(), Tokenizer(16), SIZE, "a test", resize=resize)
    whole = TrainTransform(SIZE, scale=(1.0, 1.0), ratio=(1.0, 1.0), relative_ratio=True)
    assert len(seen) == len(files) == 200
    for image in files:
        expected = torch.from_numpy(seen[image.name])
        assert torch.equal(loaded.preprocess(image.data), expected), image.name
        if mode == "squash":
            assert torch.equal(whole(decode_image(image.data), 3), expected), image.name


def test_an_image_that_cannot_be_used_is_an_error_of_its_own():
    model = build_model(load_architecture("tiny")).eval()
    loaded = Loaded(model, Tokenizer(16), SIZE, "a test")
    with pytest.raises(UserError, match="floating-point pixels; convert it to RGB"):
        loaded.images([Image.new("F", (4, 4))])
    with pytest.raises(UserError, match="does not decode"):
        loaded.images([b"no image"])


@pytest.mark.parametrize("name", FILES)
def test_transparent_images_are_recognized(name):
    assert is_transparent(FILES[name]) == (name in WITH_ALPHA)


def test_an_alpha_channel_that_hides_nothing_is_not_transparent():
    opaque = COLORS.copy()
    opaque[..., 3] = 255
    assert not is_transparent(encoded(Image.fromarray(opaque)))
    assert not is_transparent(b"no image")


# -- JPEGs that simplejpeg rejects

PHOTO = jpeg(2, 96)
HARMLESS = {
    "bytes before the end": PHOTO[:-2] + bytes(64) + b"\xff\xd9",
    "many bytes before the end": PHOTO[:-2] + b"\x12\x34" * 500 + b"\xff\xd9",
    "bytes before a marker": PHOTO[:20] + b"\0\0" + PHOTO[20:],
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_a_jpeg_with_a_harmless_warning_is_used(kind):
    for divisor in (1, 2):  # Pillow decodes it in full
        assert torch.equal(decode_image(HARMLESS[kind], divisor), decode_image(PHOTO))


@pytest.mark.parametrize("cut", [1, 2, 20, 300])
def test_a_jpeg_that_is_cut_off_is_invalid(cut):
    with pytest.raises(InvalidSample, match="does not decode"):
        decode_image(PHOTO[:-cut])
