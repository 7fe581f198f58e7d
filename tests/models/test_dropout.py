"""The hash against plain Python integers; the masks' statistics."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from clip_train.models.dropout import SampleDropout, keep_patches, random_bits, splitmix64

_MASK = 2**64 - 1


def _python_splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def test_the_hash_is_splitmix64():
    seeds = [0, 1, -1, 2**62 + 12345, -(2**63), 2**63 - 1]
    expected = [_signed(_python_splitmix64(s & _MASK)) for s in seeds]
    assert splitmix64(torch.tensor(seeds)).tolist() == expected
    assert _python_splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    key = _python_splitmix64((_python_splitmix64(7) + 3) & _MASK)
    stream = [_signed(_python_splitmix64((key + i * 0x9E3779B97F4A7C15) & _MASK)) for i in range(5)]
    assert random_bits(torch.tensor([7]), 3, 5)[0].tolist() == stream


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_rate_and_the_mean_are_right(p: float):
    layer = SampleDropout(p, layer_id=4)
    x = torch.ones(64, 50, 81, dtype=torch.float64)  # 4050 elements of a sample: no multiple of 4
    out = layer(x, torch.arange(64))
    n = x.numel()
    sigma = (p * (1 - p) / n) ** 0.5
    assert (out == 0).double().mean().item() == pytest.approx(p, abs=5 * sigma + 1e-5)
    assert out.mean().item() == pytest.approx(1.0, abs=5 * sigma / (1 - p) + 1e-9)
    kept = out[out != 0]
    assert kept.min() == kept.max()
    assert kept[0].item() == pytest.approx(1 / (1 - p), rel=2e-4)


def test_masks_of_samples_layers_and_positions_are_unrelated():
    x = torch.ones(8, 4096)
    seeds = torch.arange(8)
    a = SampleDropout(0.5, 1)(x, seeds) != 0
    b = SampleDropout(0.5, 2)(x, seeds) != 0
    rows = torch.cat([a, b]).double() * 2 - 1  # 16 masks of 4096 signs
    correlation = (rows @ rows.T / 4096).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / 64  # five sigmas
    shifted = (rows[:, 1:] * rows[:, :-1]).mean(1)
    assert shifted.abs().max() < 5 / 64


def test_the_mask_is_the_same_in_every_precision():
    seeds = torch.arange(3)
    masks = [
        SampleDropout(0.3, 9)(torch.ones(3, 77, dtype=d), seeds) != 0
        for d in (torch.float32, torch.bfloat16)
    ]
    assert torch.equal(*masks)


def test_patch_dropout_keeps_the_class_token_and_the_order():
    x = torch.arange(17.0).expand(200, 17)[:, :, None].repeat(1, 1, 2)  # patch t holds t
    seeds = torch.arange(200)
    out, places = keep_patches(x, 0.7, 1, seeds, first=1)
    assert out.shape == (200, 1 + 4, 2)  # int(16 * 0.3)
    assert (out[:, 0] == 0).all()
    assert (out[:, 1:, 0].diff(dim=1) > 0).all() and torch.equal(out[:, 1:, 0], places + 1.0)
    counts = torch.bincount(out[:, 1:, 0].long().flatten(), minlength=17)[1:]
    assert counts.sum() == 800
    assert (counts - 50).abs().max() < 5 * (200 * 0.25 * 0.75) ** 0.5
    assert keep_patches(x, 0.99, 1, seeds, first=1)[0].shape[1] == 2


def test_seeds_must_be_one_for_each_sample():
    with pytest.raises(ValueError, match=r"needs sample_seeds in training: int64 \[b\], one for"):
        SampleDropout(0.5, 0)(torch.ones(3, 4), None)
    with pytest.raises(RuntimeError, match="shape"):
        SampleDropout(0.5, 0)(torch.ones(3, 4), torch.arange(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: masks not compared")
def test_a_gpu_draws_the_same_masks():
    seeds = torch.arange(-8, 8) * 2**59
    x = torch.ones(16, 50, 33)
    for masked in (SampleDropout(0.3, 5), partial(keep_patches, p=0.5, layer_id=1, first=1)):
        here, there = (masked(x.to(d), sample_seeds=seeds.to(d)) for d in ("cpu", "cuda"))
        assert torch.equal(here[0], there[0].cpu())
