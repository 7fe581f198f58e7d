"""What ranks send in a step, recorded under torch's fake process group at 8, 64 and 512 ranks: the types
that the docs name, and the bytes that `clip-train plan` prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from clip_tools.communication import SMALLEST, collectives, network_bytes, shapes_of, table
from clip_train.engines.traffic import BYTES, Collective, Links
from clip_train.errors import UserError
from clip_train.recipe.recipe import Recipe, load_config
from clip_train.recipe.resolve import resolve
from tests.documents import ROOT

SAMPLES = 8  # of a rank
TYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float64": "fp64",
    "int64": "int64",
    "uint8": "uint8",
}
SUMS = ("all_reduce", "reduce_scatter")
OPERATORS = ("all_gather", "all_to_all", "send", *SUMS)
EVERY_STAGE = [
    {"kind": kind, "zero_stage": stage, "precision": precision}
    for kind in ("deepspeed", "fsdp")
    for stage in range(4)
    for precision in ("bf16", "fp32")
    if (kind, stage, precision) != ("deepspeed", 0, "bf16")  # refused
]
BF16 = {"precision": "bf16"}
HSDP = {"kind": "fsdp", "shard_ranks": 4, **BF16}
FSDP = {"kind": "fsdp", **BF16}
FROZEN = [
    {"model": {"lock_image": True}},
    {"model": {"lock_image": True, "lock_image_unlocked_groups": 3}},
    {"model": {"lock_text": True}},
    {"model": {"freeze": ["visual.transformer.resblocks.2.*"]}},
]
LOCKED = FROZEN[0]
# DeepSpeed plans gathers by the order of the last forward, and the second one leaves the tower out
FORGETFUL = {"kind": "deepspeed", "zero_stage": 3, **BF16, **LOCKED}
SIGMOID = {"model": {"init_logit_bias": -10, "init_logit_scale": 2.3}}
BANK = {"kind": "memory_bank", "bank_size": 64, "bank_warmup_steps": 0}
TAUGHT = {"model": {"teacher": __file__, "teacher_name": "tiny"}}  # whose weights nobody reads
CASES = {
    8: [
        *EVERY_STAGE,
        {"kind": "fsdp", "zero_stage": 3, "micro_batches": 4, "kept_graphs": 2, **BF16},
        {"kind": "fsdp", "zero_stage": 2, "reduce_gradients": "once", **BF16},
        {"kind": "fsdp", "zero_stage": 2, "reduce_dtype": "bf16", **BF16},
        {"kind": "deepspeed", "zero_stage": 3, "micro_batches": 1, **BF16},
        {"kind": "deepspeed", "zero_stage": 2, "reduce_gradients": "once", **BF16},
        {"kind": "deepspeed", "zero_stage": 3, "reduce_gradients": "once", **BF16},
        {"kind": "deepspeed", "zero_stage": 1, "offload": "optimizer", **BF16},
        {"kind": "deepspeed", "zero_stage": 1, "reduce_dtype": "bf16", **BF16},
        {"kind": "deepspeed", "zero_stage": 3, "reduce_dtype": "bf16", **BF16},
        *({"zero_stage": stage, **HSDP} for stage in (1, 2, 3)),
        *({"kind": kind, "zero_stage": stage, **BF16, **LOCKED} for kind in ("deepspeed", "fsdp") for stage in (1, 2)),
        *({"zero_stage": 3, **FSDP, **frozen} for frozen in FROZEN),
        {"zero_stage": 3, "micro_batches": 4, "kept_graphs": 2, **FSDP, **FROZEN[1]},
        {"zero_stage": 3, "micro_batches": 2, "kept_graphs": 2, **FSDP, **FROZEN[2]},
        {"zero_stage": 3, "micro_batches": 1, **FSDP, **FROZEN[2]},
        {"kind": "deepspeed", "zero_stage": 3, "micro_batches": 1, **BF16, **LOCKED},
        FORGETFUL,
        {"kind": "deepspeed", "zero_stage": 3, **BF16, **FROZEN[1]},
        {"zero_stage": 2, **HSDP, **LOCKED},
        {"kind": "deepspeed", "zero_stage": 3, "compile": True, **BF16},
        {"zero_stage": 3, "compile": True, "micro_batches": 1, **FSDP},
        {"kind": "deepspeed", "zero_stage": 2, "pack_texts": False, **BF16},
        {"kind": "fsdp", "zero_stage": 1, "loss": {"kind": "sigmoid"}, **BF16, **SIGMOID},
        {"zero_stage": 0, "loss": {"kind": "sigmoid", "exchange": "ring"}, **FSDP, **SIGMOID},
        {"kind": "fsdp", "zero_stage": 2, "loss": {}, **BF16, **TAUGHT},
        {"zero_stage": 3, "optim": {"name": "muon"}, **FSDP},
        {"zero_stage": 2, "optim": {"name": "muon"}, **HSDP, **LOCKED},
        {"kind": "deepspeed", "zero_stage": 3, "optim": {"name": "muon"}, **BF16},
    ],
    64: [
        {"kind": "fsdp", "zero_stage": 2, "loss": BANK, **BF16},
        {"kind": "fsdp", "zero_stage": 2, "loss": {"exchange": "ring"}, **BF16},
        {"kind": "deepspeed", "zero_stage": 2, "loss": {"bank_mode": "contaccum", **BANK}, **BF16},
        *({"kind": kind, "zero_stage": stage, **BF16} for kind in ("deepspeed", "fsdp") for stage in (1, 3)),
        {"zero_stage": 2, **HSDP},
    ],
    512: [
        *({"kind": kind, "zero_stage": stage, **BF16} for kind in ("deepspeed", "fsdp") for stage in (2, 3)),
        {"zero_stage": 3, **HSDP},
    ],
}  # fmt: skip


def recipe(world_size: int, case: dict) -> dict:
    """A case is an `engine` section, and "model", "loss" and "optim", and how many micro-batches it takes."""
    engine = dict(case)
    batch = {
        "global_size": SAMPLES * world_size,
        "micro_size": SAMPLES // engine.pop("micro_batches", 2),
        "kept_graphs": engine.pop("kept_graphs", 1),
    }
    return {
        "run": {"name": "wire", "steps": 3000},
        "model": {"name": "tiny", **engine.pop("model", {})},
        "data": {"train": "x.tar", "num_samples": 10_000},
        "batch": batch,
        "loss": engine.pop("loss", {}),
        "optim": engine.pop("optim", {}),
        "engine": engine,
    }


@cache
def recorded(world_size: int) -> list[dict]:
    """One process takes the steps of all cases."""
    line = [
        sys.executable,
        "-m",
        "tests.engine.wire",
        str(world_size),
        json.dumps([recipe(world_size, case) for case in CASES[world_size]]),
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def calls(world_size: int, i: int) -> list[tuple[str, str, str, int, int, int]]:
    """(place, operator, type, elements, ranks, times) of calls that are not small."""
    found = []
    for place, name, dtype, elements, ranks, times in recorded(world_size)[i]["calls"]:
        if ranks > 1 and elements * BYTES.get(TYPES[dtype], 1) >= SMALLEST:
            operator = next(each for each in OPERATORS if name.removeprefix("i").startswith(each))
            found.append((place, operator, TYPES[dtype], elements, ranks, times))
    return found


def values(case: dict) -> list[str]:
    """As a name of the case; no place on this machine is part of it."""
    nested = [values(x) if isinstance(x, dict) else [str(x)] for x in case.values()]
    return [x for each in nested for x in each if x != __file__]


def cases() -> list:
    return [
        pytest.param(world_size, i, id=f"{world_size} {' '.join(values(case))}")
        for world_size, its in CASES.items()
        for i, case in enumerate(its)
    ]


@pytest.mark.parametrize(("world_size", "i"), cases())
def test_a_plan_counts_what_is_recorded(world_size, i):
    config = Recipe.model_validate(recipe(world_size, CASES[world_size][i]))
    resolved = resolve(config, world_size, read_data=False)
    planned = table(collectives(resolved, shapes_of(resolved)), None)

    sent, times = Counter(), Counter()
    for place, operator, dtype, elements, ranks, number in calls(world_size, i):
        sent[place, operator, dtype, ranks] += number * elements * BYTES[dtype]
        times[place, operator, dtype, ranks] += number
    columns = ("place", "operator", "dtype", "ranks")
    expected = {tuple(row[name] for name in columns): row["bytes"] for row in planned}
    if CASES[world_size][i] == FORGETFUL:
        assert sum(expected.values()) == pytest.approx(sum(sent.values()), rel=0.05)
        return
    assert expected == sent
    if config.engine.kind == "fsdp":  # DeepSpeed splits and joins by the sizes of its buckets
        assert {tuple(row[name] for name in columns): row["calls"] for row in planned} == times


@pytest.mark.parametrize(("world_size", "i"), cases())
def test_gradients_are_summed_in_fp32(world_size, i):
    """Unless the recipe says bf16. Gathered parameters have the model's precision, and no tensor is on
    a device that its group does not serve."""
    section = CASES[world_size][i]
    found = [call for call in calls(world_size, i) if call[0] != "loss"]
    summed = {dtype for _, operator, dtype, *_ in found if operator in SUMS}
    assert summed == {section.get("reduce_dtype", "fp32")}
    assert {dtype for _, operator, dtype, *_ in found if operator == "all_gather"} <= {
        section["precision"]
    }
    assert recorded(world_size)[i]["foreign"] == []


GATHERED, SUMMED = ("all_gather", "fp32"), ("all_reduce", "fp64")
OF_LOSS = {
    "info_nce": {GATHERED, SUMMED},
    "sigmoid": {GATHERED},
    "ring": {("send", "fp32")},
    "memory_bank": {GATHERED, SUMMED, ("all_gather", "int64")},
}


@pytest.mark.parametrize(("world_size", "i"), cases())
def test_the_sums_of_features_are_wide(world_size, i):
    """The loss: features in fp32, sums of exponentials in fp64, and hashes of keys."""
    loss = CASES[world_size][i].get("loss", {})
    found = {call[1:3] for call in calls(world_size, i) if call[0] == "loss"}
    assert found == OF_LOSS[loss.get("exchange", loss.get("kind", "info_nce"))]


def test_milliseconds_of_a_large_model():
    """bigG/14 on 128 H100, ZeRO 3 over all of them in bf16: 153 GB over 45 GB/s take 3.4 s. In groups of a
    node only the sums of shards leave it."""
    recipe = str(ROOT / "recipes/vit_bigg14.yaml")
    keys = ["engine.kind=fsdp", "engine.zero_stage=3", "batch.micro_size=64", "batch.kept_graphs=2"]
    config = load_config(recipe, keys)
    links = Links(450e9, network_bytes("400Gb"), 8, hop=0.0)
    assert links.network == 45e9

    def seconds(**engine) -> tuple[float, float, float]:
        resolved = resolve(config.updated(engine=engine), 128, read_data=False)
        sent = collectives(resolved, shapes_of(resolved))
        between = sum(call.bytes for call in sent if links.crosses(call))
        return (
            sum(call.bytes for call in sent) / 1e9,
            between / 1e9,
            sum(call.times * links.seconds(call) for call in sent),
        )

    P = 2.5395671  # billions of parameters
    sent, between, whole = seconds(reduce_dtype="bf16")
    features = 2 * 65536 * 1280 * 4 / 1e9
    assert sent == between == pytest.approx(2 * P * (3 * 8 - 2 + 8) + features, rel=1e-3)
    assert whole == pytest.approx(sent * 127 / 128 / 45, rel=1e-3) and 3.3 < whole < 3.5
    _, between, grouped = seconds(shard_ranks=8)
    assert between == pytest.approx(4 * P / 8 + features, rel=1e-2)
    inside = (2 * P * 22 + 4 * P * 8) * 7 / 8 / 450
    across = 2 * 15 / 16 * 4 * P / 45 + features / 45
    assert grouped == pytest.approx(inside + across, rel=1e-2)


def test_what_is_hidden():
    """Three units of a backward of 3 s: the second's sum waits for the first's, and the root's for all."""
    links = Links(1e9, 1e9, 8, hop=0.0)
    second = 8 / 7 * 1e9 / 4  # elements that take a second
    units = [Collective("last backward", "reduce_scatter", "fp32", round(n * second), 8, alone=alone)
             for n, alone in ((1.5, 1 / 3), (1.5, 2 / 3), (0.5, 1.0))]  # fmt: skip
    assert links.exposed(units[:1], 3.0) == 0.0
    assert links.exposed(units[:2], 3.0) == pytest.approx(1.0)
    assert links.exposed(units, 3.0) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("text", "rate"), [("400Gb", 45e9), ("8x400Gb", 360e9), ("2x12.5Gb", 2.8125e9)]
)
def test_the_network_of_a_node(text, rate):
    assert network_bytes(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["400", "400GB", "x400Gb", "-1Gb"])
def test_a_network_without_a_unit_is_refused(text):
    with pytest.raises(
        UserError, match=r"--network .* must be the Gbit/s of a node, such as 400Gb"
    ):
        network_bytes(text)
