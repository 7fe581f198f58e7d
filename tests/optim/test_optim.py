"""Groups and schedules against OpenCLIP's definitions, written out here anew."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer, decay_groups
from clip_train.optim.schedule import ScheduleConfig, learning_rate


def test_gains_biases_and_the_temperature_do_not_decay():
    with torch.device("meta"):
        model = CLIP(load_architecture("tiny"))
    named = dict(model.named_parameters())
    without, with_decay = decay_groups(named.items(), 0.2)
    name_of = {id(p): name for name, p in named.items()}
    decayed = {name_of[id(p)] for p in with_decay["params"]}
    spared = {name_of[id(p)] for p in without["params"]}
    assert decayed | spared == set(named) and not decayed & spared
    assert {"visual.conv1.weight", "visual.proj", "token_embedding.weight", "positional_embedding"} <= decayed
    assert {"logit_scale", "visual.class_embedding", "ln_final.weight", "visual.ln_pre.bias"} <= spared
    assert {"transformer.resblocks.0.attn.in_proj_bias", "transformer.resblocks.0.ln_1.weight"} <= spared
    assert (without["weight_decay"], with_decay["weight_decay"]) == (0.0, 0.2)


def test_a_partitioned_parameter_is_judged_by_its_true_shape():
    p = nn.Parameter(torch.empty(0))
    p.ds_shape = torch.Size([4, 4])
    assert [g["weight_decay"] for g in decay_groups([("mlp.c_fc.weight", p)], 0.1)] == [0.1]


def test_frozen_parameters_are_left_out():
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    assert decay_groups([("a.weight", frozen)], 0.1) == []


@pytest.mark.parametrize("name, kind", [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_build_optimizer(name, kind):
    optimizer = build_optimizer(OptimConfig(name=name, lr=0.3), nn.Linear(2, 2).named_parameters())
    assert isinstance(optimizer, kind)
    assert all(group["lr"] == 0.3 for group in optimizer.param_groups)


@pytest.mark.parametrize("rule, peak", [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_scales_with_the_global_batch(rule, peak):
    reference = None if rule == "none" else 256
    assert OptimConfig(lr=0.1, lr_scaling=rule, reference_batch=reference).peak_lr(1024) == pytest.approx(peak)


@pytest.mark.parametrize("half", [{"lr_scaling": "sqrt"}, {"reference_batch": 256}])
def test_half_a_scaling_rule_is_refused(half):
    with pytest.raises(ValueError, match="go together"):
        OptimConfig(**half)


def test_warm_up_then_cosine_to_zero():
    config = ScheduleConfig(name="cosine", warmup_steps=10)
    rates = [learning_rate(config, 2.0, step, 110) for step in range(110)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == 2.0
    assert rates[60] == pytest.approx(1.0)
    assert rates[109] == pytest.approx(1 + math.cos(math.pi * 99 / 100), abs=1e-12)
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_constant_and_cooldown():
    constant = ScheduleConfig(name="constant", warmup_steps=0)
    assert {learning_rate(constant, 0.7, step, 50) for step in range(50)} == {0.7}
    cooldown = ScheduleConfig(name="constant-with-cooldown", warmup_steps=2, cooldown_steps=4, final_lr=0.1)
    rates = [learning_rate(cooldown, 0.5, step, 10) for step in range(10)]
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2])
