"""From a decoded image to the pixels that a tower is given, S x S or at native resolution; and
images that are drawn, without any file.

Resizing is torch's bicubic with antialiasing on uint8: 2.4 times as fast as OpenCLIP's Pillow path
at 512 px, and within 54 dB PSNR of it. Color augmentation is torchvision's ColorJitter and
Grayscale on Pillow's operations, as in OpenCLIP's `--aug-cfg`.
"""

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from torch.nn import functional as F

from clip_train.data.order import hash64
from clip_train.errors import UserError
from clip_train.native import to_rows
from clip_train.resizing import AS_CLIP, Interpolation, Patches, Resize, budget_at
from clip_train.settings import call_imported, checked_options, import_path

CROP_TRIES = 10
ERASED = torch.tensor([122, 116, 104], dtype=torch.uint8)[:, None, None]  # CLIP's mean
DIVISORS = (1, 2, 4, 8)  # by which JPEG decoders shrink an image at little cost
MAX_STRETCH = 32  # evaluation keeps the middle of images that are more than this times as long
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
HUE = len(ENHANCERS)  # the fourth operation of ColorJitter
# the last argument of hash64 for a sample's budget of patches: each use of a seed has its own
BUDGETS = -7
OFFSETS = 1 << 20  # places of one row of noise where a synthetic image can begin
WORDS = (
    "a", "the", "of", "on", "in", "with", "and", "photo", "painting", "small", "large", "old",
    "red", "green", "blue", "black", "white", "cat", "dog", "bird", "horse", "boat", "car",
    "train", "street", "tree", "river", "mountain",
)  # fmt: skip
FEWEST, MOST = 4, 24  # words of a synthetic caption


def own_augmentation(
    path: str | None, options: Mapping[str, Any]
) -> Callable[[Tensor], Tensor] | None:
    """The augmentation of `data.aug_own`: a function, or an object of a class. UserError."""
    if path is None:
        return None
    found = import_path("data.aug_own", path)
    if isinstance(found, type):
        return call_imported("data.aug_own", path, options)
    return functools.partial(found, **checked_options("data.aug_own", path, options))


def rand_augment(image: Image.Image, operation: int, m: float) -> Image.Image:
    """One operation of torchvision's RandAugment on Pillow's images, of magnitude m, as DataCompDR
    numbers them. KeyError for another number."""
    moves = {  # from a pixel's place to that of the pixel it is taken from
        1: (1, m, 0, 0, 1, 0),
        2: (1, 0, 0, m, 1, 0),
        3: (1, 0, -int(m), 0, 1, 0),
        4: (1, 0, 0, 0, 1, -int(m)),
    }
    if operation in moves:
        return image.transform(image.size, Image.Transform.AFFINE, moves[operation])
    factors = {6: "Brightness", 7: "Color", 8: "Contrast", 9: "Sharpness"}
    if operation in factors:
        return getattr(ImageEnhance, factors[operation])(image).enhance(1 + m)
    others: dict[int, Callable[[], Image.Image]] = {
        0: image.copy,
        5: functools.partial(image.rotate, m),
        10: functools.partial(ImageOps.posterize, image, int(m)),
        11: functools.partial(ImageOps.solarize, image, math.ceil(m)),
        12: functools.partial(ImageOps.autocontrast, image),
        13: functools.partial(ImageOps.equalize, image),
    }
    return others[operation]()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Whatever is drawn within from Python's, NumPy's or torch's generator follows the seed."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # CUDA's are left alone
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def augmented(augmentation: Callable[[Tensor], Tensor], image: Tensor, seed: int) -> Tensor:
    """`augmentation(image)`, a function of the image and the seed. uint8 [3, S, S] -> the same.

    UserError for anything else."""
    with seeded(seed):
        out = augmentation(image)
    if not isinstance(out, Tensor) or (out.dtype, out.shape) != (image.dtype, image.shape):
        what = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise UserError(
            f"data.aug_own returned {what} for uint8 {list(image.shape)}; return a tensor of the "
            "same type and shape"
        )
    return out


@dataclass(frozen=True)
class TrainTransform:
    """RandomResizedCrop as CLIP and OpenCLIP train with it. Then, if asked for, a flip, ColorJitter
    and Grayscale, an augmentation of the user's own, and an erased rectangle."""

    image_size: int  # S, the side of the result in pixels
    scale: tuple[float, float] = (0.9, 1.0)  # the crop's area as a fraction of the image's
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # the crop's width / height
    relative_ratio: bool = False  # `ratio` is relative to the image's own
    # strengths of brightness, contrast, saturation and hue; None: no jitter
    color_jitter: tuple[float, float, float, float] | None = None
    color_jitter_prob: float = 1.0
    gray_scale_prob: float = 0.0
    flip_prob: float = 0.0
    erase_prob: float = 0.0
    augmentation: Callable[[Tensor], Tensor] | None = None  # uint8 [3, S, S] -> the same
    scaled_decode: bool = False  # decode JPEGs smaller where the crop allows it
    patches: Patches | None = None  # native resolution; None: squares
    # native resolution: the share of samples that have a budget of patches, by budget
    budgets: Mapping[int, float] = field(default_factory=dict)

    def size_of(self, height: int, width: int, sample_seed: int) -> tuple[int, int]:
        """The height and width to which a region of this shape is resized."""
        if self.patches is None:
            return self.image_size, self.image_size
        place = hash64(sample_seed, 0, BUDGETS) / 2**63
        return self.patches.size_within(height, width, budget_at(self.budgets, place))

    def rows(self, image: Tensor) -> Tensor:
        """An image of the size of `size_of`, as it is stored in a batch: uint8 of `row_shape`."""
        if self.patches is None:
            return image
        return to_rows(image, self.patches.size, self.patches.most)

    def divisor(self, height: int, width: int, sample_seed: int) -> int:
        """The largest of 1, 2, 4, 8 by which the sides of an image can be divided before it is
        cropped, and its crop is not enlarged."""
        *_, h, w = self.crop(height, width, random.Random(sample_seed))
        to_h, to_w = self.size_of(h, w, sample_seed)
        return max((d for d in DIVISORS if h >= d * to_h and w >= d * to_w), default=1)

    def __call__(
        self, image: Tensor, sample_seed: int, size: tuple[int, int] | None = None
    ) -> Tensor:
        """uint8 [3, H, W] -> uint8 [3, S, S], or of the size of `size_of`: a function of the image
        and the seed alone.

        size: (height, width) that the image had before its sides were divided. The crop is drawn
            for it; its place and its sides are rounded to pixels of the smaller image.
        """
        rng = random.Random(sample_seed)
        drawn_for = size or (image.shape[1], image.shape[2])
        divisor = round(drawn_for[0] / image.shape[1])
        box = self.crop(*drawn_for, rng)
        top, left, height, width = (round(edge / divisor) for edge in box)
        region = image[:, top : top + height, left : left + width]
        size_of_crop = self.size_of(*box[2:], sample_seed)
        out = _resize(region, *size_of_crop).contiguous()
        jittered = rng.random() < self.color_jitter_prob and self.color_jitter is not None
        gray = rng.random() < self.gray_scale_prob
        if self.flip_prob and rng.random() < self.flip_prob:
            out = out.flip(2)
        if jittered or gray:
            picture = Image.fromarray(out.permute(1, 2, 0).contiguous().numpy())
            if jittered and self.color_jitter is not None:
                for operation, factor in color_operations(rng, self.color_jitter):
                    picture = adjust_color(picture, operation, factor)
            if gray:
                picture = picture.convert("L").convert("RGB")
            out = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        if self.augmentation is not None:
            out = augmented(self.augmentation, out.contiguous(), sample_seed)
        if self.erase_prob and rng.random() < self.erase_prob:
            # as torchvision's RandomErasing draws it by default
            erased = replace(self, scale=(0.02, 0.33), ratio=(0.3, 3.3), relative_ratio=False)
            top, left, height, width = erased.crop(*size_of_crop, rng)
            out = out.clone()
            out[:, top : top + height, left : left + width] = ERASED
        return out.contiguous()

    def stored(self, image: Tensor, augmentation: Sequence[Any]) -> Tensor:
        """uint8 [3, H, W] -> uint8 [3, S, S], by stored parameters: [[top, left, height, width]],
        and of RandAugment [[operation, magnitude], ...] behind it, or null. ValueError where the
        image is smaller than the crop."""
        (top, left, height, width), *operations = augmentation
        region = image[:, top : top + height, left : left + width]
        if region.shape[1:] != (height, width) or min(top, left, height, width) < 0:
            raise ValueError(f"the crop is not within an image of {list(image.shape[1:])}")
        out = _resize(region, self.image_size, self.image_size)
        if any(operations):
            picture = Image.fromarray(out.permute(1, 2, 0).contiguous().numpy())
            for operation, magnitude in itertools.chain(*filter(None, operations)):
                picture = rand_augment(picture, operation, magnitude)
            out = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return out.contiguous()

    def crop(self, height: int, width: int, rng: random.Random) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the region, as torchvision's RandomResizedCrop draws it,
        unless the ratio is relative."""
        low, high = self.ratio
        if self.relative_ratio:
            low, high = low * width / height, high * width / height
        for _ in range(CROP_TRIES):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return rng.randint(0, height - h), rng.randint(0, width - w), h, w
        # the image is too long for that: the largest region in the middle with an allowed ratio
        w, h = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
        return (height - h) // 2, (width - w) // 2, h, w


def to_square(image: Tensor, size: int, resize: Resize = AS_CLIP) -> Tensor:
    """uint8 [3, H, W] -> uint8 [3, size, size], as OpenCLIP's transforms for evaluation, with
    torchvision's rounding."""
    mode, interpolation = resize.resize_mode, resize.interpolation
    if mode == "squash":
        return _resize(image, size, size, interpolation).contiguous()
    if mode == "longest":
        ratio = max(image.shape[1:]) / size  # in this order, halves round as in OpenCLIP
        height, width = (max(1, round(side / ratio)) for side in image.shape[1:])
        top, left = (size - height) // 2, (size - width) // 2
        out = image.new_zeros(3, size, size)
        out[:, top : top + height, left : left + width] = _resize(
            image, height, width, interpolation
        )
        return out
    shorter = min(image.shape[1:])
    longest = MAX_STRETCH * shorter
    # as many pixels are cut from both ends: the middle stays where it was
    longest += (max(image.shape[1:]) - longest) % 2
    image = _middle(image, *(min(side, longest) for side in image.shape[1:]))
    height, width = (int(size * side / shorter) for side in image.shape[1:])
    return _middle(_resize(image, height, width, interpolation), size, size).contiguous()


def for_evaluation(
    image: Tensor, image_size: int, resize: Resize = AS_CLIP, patches: Patches | None = None
) -> Tensor:
    """uint8 [3, H, W] -> uint8 [3, image_size, image_size], or at native resolution
    `Patches.row`."""
    if patches is None:
        return to_square(image, image_size, resize)
    size = patches.size_within(image.shape[1], image.shape[2], patches.most)
    return to_rows(_resize(image, *size, resize.interpolation), patches.size, patches.most)


def _resize(
    image: Tensor, height: int, width: int, interpolation: Interpolation = "bicubic"
) -> Tensor:
    """uint8 [3, H, W] -> uint8 [3, height, width]"""
    if image.shape[1:] == (height, width):
        return image
    return F.interpolate(image[None], size=(height, width), mode=interpolation, antialias=True)[0]


def _middle(image: Tensor, height: int, width: int) -> Tensor:
    top, left = round((image.shape[1] - height) / 2), round((image.shape[2] - width) / 2)
    return image[:, top : top + height, left : left + width]


def color_operations(rng: random.Random, strengths: Sequence[float]) -> list[tuple[int, float]]:
    """The operations of torchvision's ColorJitter in random order, each with a random factor.

    strengths: of brightness, contrast and saturation, whose factors are uniform in [max(0, 1 - s),
        1 + s], and of hue, whose factor is in [-s, s]; 0 leaves an operation out.
    """
    order = rng.sample(range(HUE + 1), HUE + 1)
    factors = [rng.uniform(max(0.0, 1 - s), 1 + s) for s in strengths[:HUE]]
    factors.append(rng.uniform(-strengths[HUE], strengths[HUE]))
    return [(operation, factors[operation]) for operation in order if strengths[operation]]


def adjust_color(image: Image.Image, operation: int, factor: float) -> Image.Image:
    """torchvision's adjust_brightness (0), adjust_contrast (1) and adjust_saturation (2), where a
    factor of 1 changes nothing, and adjust_hue (3), which turns the hue by `factor` of a whole
    circle."""
    if operation < HUE:
        return ENHANCERS[operation](image).enhance(factor)
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(level + int(factor * 255)) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def synthetic_sample(
    seed: int, transform: TrainTransform, num_texts: int = 1
) -> tuple[Tensor, list[str]]:
    """Noise of uint8 as `TrainTransform.rows` gives it, in memory that images share, and captions:
    both by the sample's seed alone."""
    rng = random.Random(seed)
    captions = [" ".join(rng.choices(WORDS, k=rng.randint(FEWEST, MOST))) for _ in range(num_texts)]
    # the shape matters at native resolution only
    shape = round(1000 * 2 ** rng.uniform(-1, 1)), 1000
    height, width = transform.size_of(*shape, seed)
    largest = 3 * transform.image_size**2
    if transform.patches is not None:
        largest = 3 * transform.patches.size**2 * transform.patches.most
    begin, size = seed % OFFSETS, 3 * height * width
    noise = _noise(largest + OFFSETS)[begin : begin + size].view(3, height, width)
    return transform.rows(noise), captions


@functools.cache
def _noise(size: int) -> Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
