"""Initial weights drawn tensor by tensor: those of the whole model, in little memory, on any layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from clip_train.models.clip import build_model
from clip_train.models.config import ModelConfig
from clip_train.models.drawing import Drawn, undrawn_buffers
from clip_train.models.weights import DrawnState, initial_weights
from clip_train.task import StateRange
from tests.models.small import small_architecture

MIB = 2**20


class Redrawn(nn.Module):
    """What constructors do: draw again, rescale, tie, fill rows, and read one parameter for another."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(width, width), nn.Linear(width, width)
        self.tied.weight = self.first.weight
        self.embedding = nn.Embedding(width, width, padding_idx=3)
        self.table = nn.Parameter(torch.empty(width, width))
        self.copy = nn.Parameter(torch.empty(2, width, width).transpose(0, 2))
        self.constant = nn.Parameter(0.5 * torch.randn(width, width))
        self.register_buffer("mask", torch.empty(width, width).fill_(-1).triu_(1), persistent=False)
        self.register_buffer("mean", torch.zeros(width))
        with torch.no_grad():
            nn.init.trunc_normal_(self.table, std=0.02)
            self.first.weight.normal_(std=0.1)[5].zero_()
            self.copy[..., 0].copy_(self.table * 2)
            self.copy[..., 1].uniform_()
            self.first.weight.div_(3.0)


def whole(build: Callable[[], nn.Module], seed: int) -> dict[str, torch.Tensor]:
    """As the constructor alone draws it."""
    torch.manual_seed(seed)
    return build().state_dict()


def taken(drawn: Drawn) -> tuple[bool, dict[str, torch.Tensor]]:
    state: dict[str, torch.Tensor] = {}
    same = drawn.draw(lambda name, tensor: state.setdefault(name, tensor.clone()) is None)
    return same, state


@pytest.mark.parametrize("build", [Redrawn, partial(build_model, small_architecture())])
def test_what_is_drawn_by_itself_is_what_the_whole_model_draws(build):
    before = torch.get_rng_state()
    drawn = Drawn(build, 3, large=256)
    same, state = taken(drawn)
    assert torch.equal(torch.get_rng_state(), before)
    expected = whole(build, 3)
    assert same and state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    same, again = taken(drawn)
    assert same and all(torch.equal(again[name], expected[name]) for name in expected)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_one_tensor_at_a_time_is_in_memory():
    """24 layers of 4 MiB, each drawn twice. Half of them is the limit: what the allocator keeps depends on the tests
    before."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
        for layer in model:
            nn.init.normal_(layer.weight)
        return model

    taken(Drawn(lambda: nn.Sequential(nn.Linear(1024, 1024)), 0))  # what any first call allocates
    before, seen = resident(), []
    drawn = Drawn(build, 0)
    seen.append(resident())
    assert drawn.draw(lambda name, tensor: seen.append(resident()))
    assert len(seen) == 1 + 24 and max(seen) - before < 12 * 4 * MIB


def test_a_constructor_that_differs_between_runs_is_drawn_whole():
    calls = count()

    def build() -> nn.Module:
        """The second time it draws a layer for nothing."""
        if next(calls) == 1:
            nn.Linear(16, 32)
        return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    source = DrawnState({}, Drawn(build, 5, large=256))
    source.prepare([StateRange("1.weight", "param", 7, 9)])
    expected = whole(build, 5)["1.weight"].flatten()[7:16]
    assert torch.equal(source.read("1.weight", "param", 7, 9), expected)


def test_buffers_are_computed_whatever_their_size():
    for large in (256, MIB):  # a large one is the parameters' equal
        buffers = undrawn_buffers(Redrawn, large)
        assert torch.equal(buffers["mask"], Redrawn().mask) and not buffers["mean"].any()


def test_a_rank_reads_only_its_part_of_loaded_and_drawn_weights(tmp_path: Path):
    state = whole(partial(build_model, ModelConfig(name="tiny").architecture()), 1)
    image = {name: t.half() for name, t in state.items() if name.startswith("visual.")}
    save_file(image, tmp_path / "image.safetensors")
    config = ModelConfig(name="tiny", init_image_from=str(tmp_path / "image.safetensors"))
    expected = whole(partial(build_model, config.architecture()), 2) | image
    source = initial_weights(config, 2)
    wanted = [
        StateRange(name, "param", t.numel() // 3, t.numel() - t.numel() // 3)
        for name, t in expected.items()
    ]
    source.prepare([*wanted, *wanted])
    for each in (*wanted, *wanted):
        assert torch.equal(source.read(*each), expected[each.name].flatten()[each.start :])
