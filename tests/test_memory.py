"""The choice of micro-batch and retained graphs, and the count of bytes that it rests on."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from clip_tools.place import NO_RUN
from clip_train.batch import BatchConfig, BatchPlan, plan_batch
from clip_train.errors import UserError
from clip_train.memory.plan import Profile, Room, cheapest_layout
from clip_train.memory.probe import fake_profile
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture
from clip_train.recipe.memory import micro_batch, predicted_profile
from clip_train.recipe.recipe import Recipe, check_config
from clip_train.recipe.resolve import Resolved
from tests.launcher.conftest import MODEL

CACHE = Profile(forward=2, graph=60, building=61, backward=64)
CHECKPOINTED = Profile(forward=2, graph=4, building=5, backward=12)
BOTH = {False: CACHE, True: CHECKPOINTED}
N = 64
ARCHITECTURE = Architecture.model_validate(MODEL)


def brute_force(limit: float, fixed: float, profiles: dict[bool, Profile]) -> float:
    """The least work of all (b, m, checkpointing), by trying every one with other words."""
    costs = []
    for b in range(1, N + 1):
        sizes = [min(b, N - i) for i in range(0, N, b)]
        if max(sizes) - (N // len(sizes)) > 1:
            continue  # cut unevenly
        for on, p in profiles.items():
            for m in [len(sizes)] if on else range(1, len(sizes) + 1):
                held = fixed + (m - 1) * b * p.graph + b * p.peak
                again = sum(sizes[: len(sizes) - m])
                forwards = N + again + (0.7 * N if on else 0)
                calls = 2 * len(sizes) + (len(sizes) - m)
                if held <= limit:
                    costs.append(forwards + 2 * N + calls)
    return min(costs)


@pytest.mark.parametrize("profiles", [{False: CACHE}, BOTH], ids=["cache", "both"])
@pytest.mark.parametrize("limit", [1070, 1100, 1300, 1500, 2000, 2600, 3400, 4500, 5200])
def test_the_least_work_that_fits(limit, profiles):
    layout = cheapest_layout(N, 1, Room(limit, 1000), profiles)
    assert layout.bytes <= limit
    assert layout.cost == brute_force(limit, 1000, profiles)
    assert (
        not layout.activation_checkpointing or layout.plan.kept_graphs == layout.plan.accum_steps
    )  # never both


def test_more_memory_is_never_slower_and_enough_fits_the_batch():
    costs = [
        cheapest_layout(N, 1, Room(limit, 0), {False: CACHE}).cost for limit in range(64, 5000, 37)
    ]
    assert costs == sorted(costs, reverse=True)
    assert cheapest_layout(N, 1, Room(1e9, 0), BOTH).plan == BatchPlan(N, 1, N, 1)


def test_what_the_recipe_says_stays():
    assert cheapest_layout(N, 2, Room(1e9, 0), {False: CACHE}, micro_size=8).plan == BatchPlan(
        N, 2, 8, 4
    )
    assert cheapest_layout(N, 1, Room(700, 0), {False: CACHE}, micro_size=8).plan == BatchPlan(
        N, 1, 8, 1 + (700 - 8 * 64) // 480
    )
    assert cheapest_layout(N, 1, Room(1000, 0), {False: CACHE}, kept_graphs=2).plan.kept_graphs == 2


def test_reductions_in_each_backward_cost():
    once, often = (
        cheapest_layout(N, 2, Room(1200, 0, many), {False: CACHE}) for many in (False, True)
    )
    assert often.cost > once.cost and often.plan.accum_steps <= once.plan.accum_steps


def test_too_little_is_told_with_what_is_needed():
    with pytest.raises(UserError, match=r"nothing fits.*memory_limit.*zero_stage"):
        cheapest_layout(N, 1, Room(1010, 1000), BOTH)


@pytest.mark.parametrize(
    "text, size", [("8GiB", 2**33), ("1.5 MB", 1_500_000), (77, 77), ("3g", 3 * 10**9)]
)
def test_sizes_are_read(text, size):
    assert BatchConfig(memory_limit=text).memory_limit == size


@pytest.mark.parametrize("text", ["much", "0", "-3GiB", "8 Gibibytes"])
def test_a_wrong_size_is_told(text):
    with pytest.raises(UserError, match=r"memory_limit .* must be bytes, a size such as 24GiB"):
        check_config({**NO_RUN, "batch": {"memory_limit": text}}, "test")


def clip(checkpointing: bool | str = False) -> CLIP:
    torch.manual_seed(0)
    return CLIP(ARCHITECTURE, dropout=0.1, activation_checkpointing=checkpointing)


def saved_bytes(model: CLIP, size: int) -> int:
    """Storages that autograd holds, by its own hooks."""
    held: dict[int, tuple[torch.Tensor, int]] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    inputs = micro_batch(ARCHITECTURE, torch.device("cpu"), size)
    own |= {
        t.untyped_storage().data_ptr() for t in (inputs.images, inputs.texts, inputs.sample_seeds)
    }

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = t, storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model.train()(inputs.images, inputs.texts, inputs.sample_seeds)
    assert out[0] is not None
    return sum(size for _, size in held.values())


def test_fake_tensors_predict_what_autograd_holds():
    predicted = fake_profile(clip, partial(micro_batch, ARCHITECTURE, torch.device("cpu")))
    # the outputs [b, D] count twice
    saved = (saved_bytes(clip(), 12) - saved_bytes(clip(), 4)) / 8
    assert predicted.graph == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("checkpointing", [False, "pointwise", True])
@pytest.mark.parametrize(
    ("vision", "locked"),
    [({}, None), ({"image_size": 64}, "image"), ({}, "text")],
    ids=["trained", "locked images", "locked texts"],
)
def test_deep_towers_are_predicted_from_shallow_ones_to_the_byte(checkpointing, vision, locked):
    vision = {**MODEL["vision_cfg"], "layers": 5, **vision}
    deep = Architecture.model_validate(
        {**MODEL, "vision_cfg": vision, "text_cfg": {**MODEL["text_cfg"], "layers": 6}}
    )
    recipe = {"run": {"steps": 1}, "data": {"train": "x.tar"}, "schedule": {"warmup_steps": 0}}
    lock = {f"lock_{locked}": True} if locked else {}
    config = Recipe.model_validate({**recipe, "model": {"dropout": 0.1, **lock}})

    def make() -> CLIP:
        model = CLIP(deep, dropout=0.1, activation_checkpointing=checkpointing)
        for name, p in model.named_parameters():
            p.requires_grad_(
                name == "logit_scale"
                or locked != ("image" if name.startswith("visual.") else "text")
            )
        return model

    whole = fake_profile(make, partial(micro_batch, deep, torch.device("cpu")))
    config = config.updated(engine={"precision": "fp32"})
    resolved = Resolved(config, config, plan_batch(config.batch, 1), deep)
    predicted = predicted_profile(resolved, checkpointing)
    assert (predicted.forward, predicted.graph, predicted.peak) == (
        whole.forward,
        whole.graph,
        whole.peak,
    )


def test_checkpointing_holds_less():
    place = partial(micro_batch, ARCHITECTURE, torch.device("cpu"))
    assert fake_profile(partial(clip, True), place).graph < 0.4 * fake_profile(clip, place).graph


def test_pointwise_recomputation_holds_five_eighths_of_a_block():
    """Of 16 widths a token: not two norms' outputs, and not GELU's four."""
    held = {}
    for layers in (2, 3):
        for kind in (False, "pointwise"):
            architecture = Architecture.model_validate(
                {**MODEL, "vision_cfg": {**MODEL["vision_cfg"], "layers": layers}}
            )
            make = partial(CLIP, architecture, activation_checkpointing=kind)
            place = partial(micro_batch, architecture, torch.device("cpu"))
            held[layers, kind] = fake_profile(make, place).graph
    block = held[3, False] - held[2, False]
    assert held[3, "pointwise"] - held[2, "pointwise"] == pytest.approx(block * 10 / 16, rel=0.05)
