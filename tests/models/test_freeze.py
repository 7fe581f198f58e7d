"""Which parameters a recipe freezes, and what that spares."""

from __future__ import annotations

import pytest
import torch

from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import parameter_sizes
from clip_train.models.config import ModelConfig
from clip_train.models.freeze import depths, freeze, frozen_names
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch
from tests.models.small import inputs, small_architecture, small_model
from tests.toy import columns_of

NAMES = list(parameter_sizes(small_architecture()))  # of two blocks in either tower


def trained(**keys) -> set[str]:
    return set(NAMES) - frozen_names(ModelConfig(**keys), NAMES)


def test_a_locked_tower_is_unlocked_group_by_group():
    """As OpenCLIP's `VisionTransformer.lock` and `lock_text_tower` (tests/peers compares with them)."""
    image = {name for name in NAMES if name.startswith("visual.")}
    last = {name for name in image if ".resblocks.1." in name} | {
        "visual.ln_post.weight",
        "visual.ln_post.bias",
    }
    first = {name for name in image if ".resblocks.0." in name}
    groups = [set(), {"visual.proj"}, last, first, image - last - first - {"visual.proj"}]
    for unlocked in range(6):
        expected = set().union(*groups[: unlocked + 1])
        assert trained(lock_image=True, lock_image_unlocked_groups=unlocked) & image == expected
    assert trained(lock_text=True) == image | {"logit_scale"}
    assert trained(lock_text=True, lock_text_unlocked_layers=1) - image == {
        "logit_scale",
        "text_projection",
    }
    assert {"ln_final.weight", "transformer.resblocks.1.ln_1.weight"} <= trained(
        lock_text=True, lock_text_unlocked_layers=2
    )


def test_patterns_join_what_is_locked():
    assert trained(lock_image=True, freeze=["*ln*", "logit_scale"]) == {
        name
        for name in NAMES
        if not name.startswith("visual.") and "ln" not in name and name != "logit_scale"
    }
    assert trained() == set(NAMES)


def test_depth_is_counted_from_the_top_of_each_tower():
    found = depths(NAMES)
    assert (found["visual.proj"], found["visual.ln_post.bias"], found["visual.transformer.resblocks.1.ln_1.bias"]) == (
        0, 0, 1,
    )  # fmt: skip
    assert (found["transformer.resblocks.0.mlp.c_fc.bias"], found["token_embedding.weight"]) == (
        2,
        3,
    )
    assert (
        found["visual.conv1.weight"] == found["visual.ln_pre.weight"] == 3
        and found["logit_scale"] == 0
    )


@pytest.mark.parametrize(
    "keys, said",
    [
        (
            {"freeze": ["visual.blocks.*"]},
            r"model.freeze \(\[visual.blocks.\*\]\): visual.blocks.\* matches none",
        ),
        ({"freeze": ["visual.projection"]}, "such as visual.proj"),
        ({"freeze": ["*"]}, "leave no parameter to train"),
        (
            {"lock_image": True, "lock_text": True, "freeze": ["logit_scale"]},
            "leave no parameter to train",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(keys, said):
    with pytest.raises(UserError, match=said):
        frozen_names(ModelConfig(**keys), NAMES)


def test_unlocking_what_is_not_locked_is_refused():
    with pytest.raises(
        ValueError,
        match=r"lock_image_unlocked_groups \(2\) has no effect without a lock; set model.lock_image=true",
    ):
        ModelConfig(lock_image_unlocked_groups=2)


def stepped(keys, micro_size):
    """Parameters after two steps in float64 with dropout, and how many images went through the tower."""
    model = small_model(dtype=torch.float64, dropout=0.2)
    freeze(model, ModelConfig(**keys))
    encoded = []
    model.visual.register_forward_hook(lambda _, args, __: encoded.append(len(args[0])))
    engine = PlainEngine(model, build_optimizer(OptimConfig(name="sgd"), model.named_parameters()))
    for s in range(2):
        result = train_step(
            engine,
            Batch(columns_of(*inputs(12, s))),
            InfoNCE(),
            micro_size=micro_size,
            kept_graphs=1,
            lr=0.1,
        )
    return torch.cat([p.detach().flatten() for p in model.parameters()]), sum(encoded), result.loss


def test_a_frozen_tower_goes_forward_once():
    for keys, images in (({"lock_image": True}, 24), ({"lock_text": True}, 24 + 18), ({}, 24 + 18)):
        whole, _, loss = stepped(keys, 12)
        cut, encoded, same = stepped(keys, 3)
        assert encoded == images
        assert same == pytest.approx(loss, rel=1e-12) and torch.allclose(
            cut, whole, rtol=1e-10, atol=1e-13
        )
