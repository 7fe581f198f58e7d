"""Groups and schedules against OpenCLIP's definitions, written out here anew."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from clip_train.errors import UserError
from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer, moment_bytes, needs, parameter_groups
from clip_train.optim.schedule import ScheduleConfig, learning_rate
from examples.lamb import Lamb
from tests.models.small import small_model


def test_gains_biases_and_the_temperature_do_not_decay():
    with torch.device("meta"):
        model = CLIP(load_architecture("tiny"))
    named = dict(model.named_parameters())
    # the group with an odd size, that of the scale, comes last
    with_decay, without = parameter_groups(OptimConfig(), named.items())
    name_of = {id(p): name for name, p in named.items()}
    decayed = {name_of[id(p)] for p in with_decay["params"]}
    spared = {name_of[id(p)] for p in without["params"]}
    assert decayed | spared == set(named) and not decayed & spared
    assert {
        "visual.conv1.weight",
        "visual.proj",
        "token_embedding.weight",
        "positional_embedding",
    } <= decayed
    assert {
        "logit_scale",
        "visual.class_embedding",
        "ln_final.weight",
        "visual.ln_pre.bias",
    } <= spared
    assert {
        "transformer.resblocks.0.attn.in_proj_bias",
        "transformer.resblocks.0.ln_1.weight",
    } <= spared
    assert (without["weight_decay"], with_decay["weight_decay"]) == (0.0, 0.2)


def test_a_partitioned_parameter_is_judged_by_its_true_shape():
    p = nn.Parameter(torch.empty(0))
    p.ds_shape = torch.Size([4, 4])
    (group,) = parameter_groups(OptimConfig(weight_decay=0.1), [("mlp.c_fc.weight", p)])
    assert group["weight_decay"] == 0.1


def test_frozen_parameters_are_left_out():
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    assert parameter_groups(OptimConfig(), [("a.weight", frozen)]) == []


def factors(**keys) -> dict[str, tuple[float, float]]:
    """name -> (factor of the learning rate, weight decay), of a model of two blocks in either tower."""
    model = small_model()
    groups = parameter_groups(OptimConfig(weight_decay=0.2, **keys), model.named_parameters())
    found = {
        id(p): (group["lr_factor"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }
    return {name: found[id(p)] for name, p in model.named_parameters()}


def test_the_first_matching_pattern_scales_the_learning_rate():
    found = factors(lr_multipliers={"visual.proj": 2.0, "visual.*": 0.1, "*proj*": 7.0})
    assert found["visual.proj"] == (2.0, 0.2) and found["visual.conv1.weight"] == (0.1, 0.2)
    assert found["visual.transformer.resblocks.0.attn.out_proj.bias"] == (0.1, 0.0)
    assert found["text_projection"] == (7.0, 0.2) and found["logit_scale"] == (1.0, 0.0)


def test_layer_decay_counts_from_the_top_of_each_tower():
    """As BEiT's `get_num_layer_for_vit`: of two blocks the ids are 0 to 3, and the factor decay^(3 - id)."""
    found = factors(layer_decay=0.5, lr_multipliers={"visual.*": 3.0})
    expected = {
        "visual.proj": 3, "visual.ln_post.weight": 3, "visual.transformer.resblocks.1.ln_1.bias": 1.5,
        "visual.transformer.resblocks.0.mlp.c_fc.weight": 0.75, "visual.class_embedding": 0.375,
        "text_projection": 1, "ln_final.bias": 1, "transformer.resblocks.1.ln_2.bias": 0.5,
        "transformer.resblocks.0.attn.in_proj_weight": 0.25, "token_embedding.weight": 0.125, "logit_scale": 1,
    }  # fmt: skip
    assert {name: found[name][0] for name in expected} == expected


def test_patterns_spare_parameters_from_decay():
    assert {name for name, (_, decay) in factors(no_decay=["*embedding*"]).items() if decay} == {
        name for name, (_, decay) in factors().items() if decay and "embedding" not in name
    }


@pytest.mark.parametrize(
    "key, value", [("lr_multipliers", {"vision.*": 0.1}), ("no_decay", ["vision.*"])]
)
def test_a_pattern_that_matches_nothing_is_refused(key, value):
    with pytest.raises(
        UserError, match=rf"optim.{key} \(.*vision\.\*.*\): vision\.\* matches none"
    ):
        factors(**{key: value})


KINDS = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "torch.optim.Adamax": torch.optim.Adamax,
}


@pytest.mark.parametrize("name, kind", KINDS.items())
def test_build_optimizer(name, kind):
    optimizer = build_optimizer(OptimConfig(name=name, lr=0.3), nn.Linear(2, 2).named_parameters())
    assert isinstance(optimizer, kind)
    assert all(group["lr"] == 0.3 for group in optimizer.param_groups)


def test_adamw_is_fused_on_a_gpu_but_not_with_masters_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for offloaded in (False, True):
        named = nn.Linear(2, 2).named_parameters()
        optimizer = build_optimizer(OptimConfig(), named, offloaded=offloaded)
        assert {group["fused"] for group in optimizer.param_groups} == {not offloaded}


class Forgetful(torch.optim.SGD):
    """Remembers in its group what no checkpoint holds."""

    def step(self, closure=None):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step(closure)


@pytest.mark.parametrize(
    "name, said",
    [
        ("torch.optim.Lyon", "cannot be imported: module 'torch.optim' has no attribute 'Lyon'"),
        ("nowhere.Optimizer", "cannot be imported: No module named 'nowhere'"),
        ("torch.nn.Linear", "is not a subclass of torch.optim.optimizer.Optimizer"),
        (
            "torch.optim.NAdam",
            "keeps the state mu_product, which does not have a parameter's shape",
        ),
        ("tests.optim.test_optim.Forgetful", "keeps the state k,"),
        ("torch.optim.LBFGS", "cannot be used|keeps the state"),
    ],
)
def test_an_optimizer_that_no_checkpoint_could_hold_is_refused(name, said):
    with pytest.raises(UserError, match=said):
        needs(OptimConfig(name=name))


IMPORTED = ("torch.optim.RMSprop", "torch.optim.Adagrad", "lion_pytorch.Lion")


def test_what_an_update_needs_and_remembers():
    configs = [OptimConfig(name=name) for name in ("adamw", "sgd", "muon", *IMPORTED)]
    told = [(needs(config), moment_bytes(config)) for config in configs]
    assert told == [
        ("elements", 8), ("elements", 0), ("elements", 8), *[("elements", 8)] * len(IMPORTED),
    ]  # fmt: skip
    with pytest.raises(UserError, match="keeps the state row_var, col_var"):
        needs(OptimConfig(name="torch.optim.Adafactor"))
    for name in ("torch.optim.Muon", "examples.lamb.Lamb"):
        assert needs(OptimConfig(name=name)) == "parameters"


def test_lamb_is_adamw_whose_update_has_the_parameters_norm():
    """arXiv 1904.00962, algorithm 2, from torch's AdamW."""
    torch.manual_seed(0)
    parameter, lr, decay = nn.Parameter(torch.randn(5, 3, dtype=torch.float64)), 0.1, 0.01
    by_adamw = nn.Parameter(parameter.detach().clone())
    adamw = torch.optim.AdamW([by_adamw], lr=1.0, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
    lamb = Lamb([parameter], lr=lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=decay)
    for _ in range(3):
        before = parameter.detach().clone()
        parameter.grad = torch.randn_like(parameter)
        by_adamw.grad = parameter.grad.clone()
        moved = by_adamw.detach().clone()
        lamb.step()
        adamw.step()
        update = (by_adamw.detach() - moved) - decay * before
        expected = before + lr * before.norm() * update / update.norm()
        assert torch.allclose(parameter.detach(), expected, rtol=1e-12, atol=0)


def test_lamb_without_decay_is_adamw():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2))
    lamb = Lamb([ours], lr=0.1, weight_decay=0.0)
    adamw = torch.optim.AdamW([theirs], lr=0.1, eps=1e-6, weight_decay=0.0)
    for _ in range(3):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        lamb.step()
        adamw.step()
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)


def test_options_are_an_imported_optimizers():
    optimizer = build_optimizer(
        OptimConfig(name="torch.optim.RMSprop", options={"alpha": 0.5}),
        nn.Linear(2, 2).named_parameters(),
    )
    assert optimizer.param_groups[0]["alpha"] == 0.5
    with pytest.raises(UserError, match=r"optim\.options\.alfa \(0\.5\): no such key"):
        needs(OptimConfig(name="torch.optim.RMSprop", options={"alfa": 0.5}))
    with pytest.raises(ValueError, match=r"go with an optim.name that is an import path"):
        OptimConfig(options={"alpha": 0.5})


def test_muon_is_for_the_matrices_within_the_blocks():
    groups = parameter_groups(OptimConfig(name="muon"), (model := small_model()).named_parameters())
    by_muon = {id(p) for group in groups if group["muon"] for p in group["params"]}
    named = {
        name.split("resblocks.")[-1][2:] for name, p in model.named_parameters() if id(p) in by_muon
    }
    assert named == {
        "attn.in_proj_weight",
        "attn.out_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    }
    assert len(by_muon) == 16 and all(
        "resblocks" in n for n, p in model.named_parameters() if id(p) in by_muon
    )


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
    cooldown = ScheduleConfig(
        name="constant-with-cooldown", warmup_steps=2, cooldown_steps=4, final_lr=0.1
    )
    rates = [learning_rate(cooldown, 0.5, step, 10) for step in range(10)]
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2])
