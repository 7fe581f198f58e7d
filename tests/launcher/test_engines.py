"""What each engine refuses of the `engine` section, before launch, with the remedy."""

from __future__ import annotations

import json

import pytest
import torch

from clip_train.data.config import resolve_workers
from clip_train.engines.config import EngineConfig
from clip_train.optim.config import OptimConfig
from clip_train.recipe.recipe import check_config
from clip_train.torch_internals import computes_fp16
from launcher.cli.main import main
from tests.documents import ROOT

FSDP, PLAIN = "engine.kind=fsdp", "engine.kind=plain"


@pytest.mark.parametrize(
    "overrides, world, said",
    [
        ([FSDP, "engine.precision=fp16"], 2, "use engine.precision=bf16, or engine.kind=deepspeed"),
        (
            [FSDP, "engine.ds_config=zero1"],
            2,
            "does not apply to engine.kind=fsdp: remove it, or set engine.kind=deepspeed",
        ),
        (
            [FSDP, "engine.shard_ranks=4"],
            6,
            "must divide the number of ranks (6): one of 1, 2, 3, 6, or null",
        ),
        (
            ["engine.reduce_dtype=bf16", "engine.precision=fp16"],
            2,
            "needs engine.precision bf16 (it is fp16): set engine.precision=bf16",
        ),
        (
            [FSDP, "engine.reduce_dtype=bf16", "engine.precision=bf16", "engine.zero_stage=1"],
            2,
            "set engine.reduce_dtype=fp32, or engine.zero_stage=2",
        ),
        ([FSDP, "engine.shard_ranks=0"], 2, "must be greater than or equal to 1"),
        (
            [FSDP, "engine.shard_ranks=2", "engine.zero_stage=0"],
            4,
            "set engine.zero_stage=1, or engine.shard_ranks=null",
        ),
        (
            [FSDP, "engine.zero_stage=0", "engine.offload=optimizer"],
            2,
            "needs engine.zero_stage 1, 2 or 3",
        ),
        (
            ["engine.kind=ddp"],
            2,
            "engine.kind ('ddp') must be 'auto', 'deepspeed', 'fsdp' or 'plain'",
        ),
        (
            ["engine.kind=deepspeed", "engine.shard_ranks=2"],
            4,
            "set engine.kind=fsdp, or take it out",
        ),
        (
            ["engine.zero_stage=0", "engine.precision=bf16"],
            2,
            "engine.zero_stage=1 (as fast), engine.precision=fp32",
        ),
        (
            ["engine.zero_stage=0", "engine.precision=fp16"],
            2,
            "engine.zero_stage=1 (as fast), engine.precision=fp32",
        ),
        (
            ["engine.zero_stage=0", "engine.offload=optimizer"],
            2,
            "needs engine.zero_stage 1, 2 or 3",
        ),
        (["engine.ds_config=zero9"], 2, "shipped ones are zero0"),
        ([PLAIN], 2, "engine.kind (plain) shards nothing, but engine.zero_stage is 1 on 2 ranks"),
        (
            [PLAIN, "engine.precision=fp16"],
            1,
            "use engine.precision=bf16, or engine.kind=deepspeed",
        ),
        ([PLAIN, "engine.offload=optimizer"], 1, "engine.offload=none, or engine.kind=fsdp"),
        ([PLAIN, "engine.ds_config=zero1"], 1, "remove it, or set engine.kind=deepspeed"),
        (
            [PLAIN, "engine.shard_ranks=2", "engine.zero_stage=0"],
            2,
            "set engine.kind=fsdp, or engine.shard_ranks=null",
        ),
    ],
)
def test_a_wrong_combination_is_refused_before_launch(recipe, overrides, world, said, capsys):
    assert main(["plan", str(recipe), *overrides, "--world-size", str(world)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("error:") == 1, err


RIGHT: tuple[dict, ...] = (
    {},
    {"kind": "fsdp"},
    {"kind": "fsdp", "zero_stage": 0, "precision": "bf16"},
    {"kind": "fsdp", "zero_stage": 3, "shard_ranks": 2},
)


@pytest.mark.parametrize("section", RIGHT, ids=str)
def test_what_is_right_is_not_refused(section):
    recipe = {"run": {"steps": 5000}, "data": {"train": "a.tar"}, "engine": section}
    config = check_config(recipe, "here").engine.on(bf16=True, gpus=4)
    assert config.package.mistakes(config, OptimConfig(), world_size=4) == []


@pytest.mark.parametrize(
    "section, gpus, kind",
    [
        ({}, 0, "deepspeed"),  # CPUs
        ({}, 1, "plain"),
        ({"offload": "optimizer"}, 1, "deepspeed"),
        ({"kind": "plain"}, 8, "plain"),
        ({}, 2, "fsdp"),
        ({"zero_stage": 3}, 512, "fsdp"),
        ({"precision": "fp16"}, 8, "deepspeed"),
        ({"ds_config": "zero1"}, 8, "deepspeed"),
        ({"shard_ranks": 2}, 0, "fsdp"),
        ({"kind": "deepspeed"}, 8, "deepspeed"),
        ({"kind": "fsdp"}, 0, "fsdp"),
    ],
    ids=str,
)
def test_the_engine_that_auto_is(section, gpus, kind):
    assert EngineConfig(**section).on(bf16=True, gpus=gpus).kind == kind


@pytest.mark.parametrize(
    "section, gpus, per_node, ranks",
    [
        ({}, 8, 8, None),  # one node
        ({}, 64, 8, 8),
        ({"zero_stage": 3}, 512, 4, 4),
        ({"zero_stage": 0}, 64, 8, None),  # nothing is sharded
        ({}, 12, 8, None),  # nodes of different sizes
        ({}, 64, 1, None),
        ({"shard_ranks": 16}, 64, 8, 16),
        ({"kind": "fsdp"}, 64, 8, None),
        ({"kind": "deepspeed"}, 64, 8, None),
        ({"precision": "fp16"}, 64, 8, None),
    ],
    ids=str,
)
def test_auto_shards_within_a_node(section, gpus, per_node, ranks):
    assert EngineConfig(**section).on(True, gpus, per_node).shard_ranks == ranks


def test_what_a_gpu_is_given():
    """Where the recipe leaves it open: bf16, and a rank's cores but two as loader workers."""
    assert [EngineConfig().on(bf16=gpu).precision for gpu in (True, False)] == ["bf16", "fp32"]
    assert EngineConfig(precision="fp16").on(bf16=True).precision == "fp16"
    compiled = [EngineConfig(compile=c).on(True, 2, compiles=True).compile for c in ("auto", False)]
    assert compiled == [True, False]
    assert [EngineConfig(compile=c).on(True, 2).compile for c in ("auto", True)] == [False, True]
    half = EngineConfig(precision="bf16", reduce_dtype="bf16")
    assert half.on(bf16=True, gpus=8).reduce_dtype == "bf16"
    assert EngineConfig(reduce_dtype="bf16").on(bf16=False).reduce_dtype == "fp32"
    assert [resolve_workers(cores, "cuda") for cores in (1, 4, 12, 64)] == [1, 2, 10, 16]
    assert [resolve_workers(cores, "cpu") for cores in (1, 2, 8, 64)] == [1, 1, 4, 4]


@pytest.mark.parametrize(
    ("stage", "precision", "parameters", "gradients", "optimizer"),
    [
        (1, "bf16", 2, 4 + 2, 12 / 4),  # beside the fp32 sum what a backward leaves
        (1, "fp16", 2, 2, 12 / 4),
        (2, "bf16", 2, 4 / 4, 12 / 4),
        (3, "bf16", 2 / 4, 4 / 4, 12 / 4),
    ],
)
def test_what_four_ranks_of_deepspeed_hold(stage, precision, parameters, gradients, optimizer):
    """Bytes of a parameter: its own, its gradient's, of the fp32 copy and two moments."""
    config = EngineConfig(kind="deepspeed", zero_stage=stage, precision=precision)
    needed = config.package.memory(config, 1000, 1000, 8, 4)
    assert (needed.parameters, needed.gradients, needed.optimizer) == (
        1000 * parameters, 1000 * gradients, 1000 * optimizer,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "precision", "reduce_dtype", "each"),
    [
        (1, "bf16", "fp32", 4),  # the bucket itself is sent
        (1, "bf16", "bf16", 4 + 2),
        (2, "bf16", "fp32", 2 + 4),  # the bucket and its copy in fp32
        (2, "bf16", "bf16", 2),
        (3, "fp32", "fp32", 4),
    ],
)
def test_the_buffers_that_deepspeed_sends(stage, precision, reduce_dtype, each):
    config = EngineConfig(
        kind="deepspeed", zero_stage=stage, precision=precision, reduce_dtype=reduce_dtype
    )
    needed = config.package.memory(config, 1000, 1000, 8, 4)
    elements = json.loads((ROOT / f"ds_configs/zero{stage}.json").read_text())
    bucket = int(float(elements["zero_optimization"].get("reduce_bucket_size", 5e8)))
    assert needed.buffers == each * bucket


@pytest.mark.skipif(
    torch.cuda.is_available() or computes_fp16(), reason="this machine computes in fp16"
)
@pytest.mark.parametrize("line", [("--dry-run",), ()])
def test_fp16_on_a_cpu_without_it_is_a_mistake(recipe, capsys, line):
    """Before an engine is built, whose library would raise."""
    status = main(["train", str(recipe), "engine.precision=fp16", *line])
    err = capsys.readouterr().err
    assert status == 2 and "engine.precision (fp16) needs a GPU, or a CPU with AVX512-FP16" in err
    assert "set engine.precision=bf16 or fp32" in err and "Traceback" not in err
