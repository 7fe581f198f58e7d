"""What a recipe names by its import path: a loss, a schedule and a model of this file."""

from __future__ import annotations

import inspect
import os
import re
import sys
from types import ModuleType
from typing import Literal

import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file
from torch import nn

from clip_tools.embed import load
from clip_train import dist
from clip_train.callbacks import Callback
from clip_train.errors import DataError, RankError, UserError
from clip_train.losses.config import LossConfig
from clip_train.losses.exchange import share_counts
from clip_train.losses.info_nce import InfoNCE
from clip_train.metrics.config import LogConfig
from clip_train.metrics.own_callbacks import own_callbacks
from clip_train.metrics.skipped import Skipped
from clip_train.models.clip import build_model
from clip_train.models.config import OwnModel
from clip_train.optim.schedule import ScheduleConfig, learning_rate
from clip_train.processes import node_name
from clip_train.settings import checked_options
from clip_train.task import NO_CONTEXT, LossOutput, Objective, named_features
from examples.losses import hard_negatives
from examples.towers import Towers, byte_tokens
from launcher.cli.main import main
from launcher.runtime.verdict import read_verdict
from tests import tolerances
from tests.launcher.conftest import finish, metrics, run, start

MODEL = "model.name=examples.towers.Towers"
LOSS = f"loss.kind={__name__}.Distance"
BOUNDED, ANNOTATED = f"loss.kind={__name__}.bounded", f"loss.kind={__name__}.annotated"
HALF_LIFE = f"schedule.name={__name__}.half_life"


class Distance(Objective):
    """weight / N sum_i |I_i - T_i|^2."""

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def __call__(self, features, context=NO_CONTEXT):
        N = sum(share_counts(len(features["image"]), context.global_size))
        difference = features["image"] - features["text"]  # [n, D]
        d_image = 2 * self.weight / N * difference
        loss = dist.all_reduce_sum(self.weight / N * difference.double().square().sum())
        no_scale = features["logit_scale"] * 0
        return LossOutput(loss, named_features(d_image, -d_image, no_scale))


class Bounds(BaseModel):
    model_config = ConfigDict(extra="forbid")
    margin: float = Field(0.25, gt=0, le=1, description="of the cosines")
    kind: Literal["hinge", "square"]


def bounded(image, text, scale, bias, rows, **options):
    assert options == {"margin": 0.5, "kind": "hinge"}, options
    return (image - text).square().sum() * options["margin"]


bounded.Options = Bounds


def annotated(
    image, text, scale, bias, rows, *, power: int, start: tuple[float, int] = (0.5, 2), mode=None
):
    assert isinstance(power, int) and isinstance(start, tuple), (power, start)
    return (image - text).abs().pow(power).sum()


def told(image, text, scale, bias, rows, mode: torch.Tensor = torch.ones(1)):  # noqa: B008
    return image.sum()


def tilted(image: torch.Tensor, share: float = 0.5) -> torch.Tensor:
    return image


class Biased(Distance):
    takes_bias = True


class Observed(InfoNCE):
    """Reports what CUDA, NCCL and PyTorch were told before the loss was computed."""

    def __call__(self, features, context=NO_CONTEXT):
        output = super().__call__(features, context)
        names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "PYTORCH_CUDA_ALLOC_CONF")
        told = {name: float(name in os.environ) for name in names}
        output.metrics |= {**told, "strict": float(torch.are_deterministic_algorithms_enabled())}
        return output


def half_life(peak: float, step: int, steps: int, half: float) -> float:
    return peak * 0.5 ** (step / half)


def endless(peak: float, step: int, steps: int) -> float:
    return peak / (steps - 1 - step or 1e-320)


def silent():
    return None


silent.embed_dim = 32


def wrong(name):
    return f"model.name={__name__}.{name}"


OWN = (MODEL, "model.patch_dropout=null", "model.dropout=0")


class Wrong(Towers):
    """What is wrong is said by the subclass's name, below."""

    def forward(self, images, texts, sample_seeds=None):
        image, text, scale, bias = super().forward(images, texts, sample_seeds)
        return image, text, scale.log() * torch.ones(2), scale


class Wide(Towers):
    embed_dim, image_mean, resize_mode = "wide", (1, 2), "cut"


class Narrow(Towers):
    def __init__(self):
        super().__init__()
        self.text_projection = nn.Linear(64, 31)


class Deaf(Towers):
    def forward(self, images, texts, sample_seeds=None):
        return super().forward(images, texts[:1], sample_seeds)


class Words(Towers):
    @staticmethod
    def tokenizer(texts):
        return torch.zeros(len(texts), 4)


class Renormed(Towers):
    def __init__(self):
        super().__init__()
        self.visual.norm = nn.BatchNorm1d(4)


@pytest.mark.engine
def test_a_model_trains_resumes_is_evaluated_and_exported(recipe, tmp_path, data):
    """Batch norms, a buffer that no checkpoint holds, pixels and tokens of its own; frozen in part, with an average."""
    common = (
        *(MODEL, "model.patch_dropout=null", "model.dropout=0", "schedule.warmup_steps=0"),
        *("engine.kind=fsdp", "optim.ema_decay=0.5", "model.freeze=[visual.stem.*]"),
        *("schedule.name=constant", "optim.lr=1e-4", "batch.micro_size=32"),
    )
    for steps in (3, 4):
        status, out = run(recipe, *common, f"run.steps={steps}", ranks=steps - 2)
        assert status == 0, out
    assert "texts are computed with their padding: examples.towers.Towers is not" in out
    assert "resuming from step 3" in out and len(metrics(tmp_path / "run")) == 4
    whole = (*common, "engine.kind=deepspeed", "run.dir=whole", "run.steps=4")
    status, out = run(recipe, *whole)
    assert status == 0, out
    one, two = (metrics(tmp_path / name) for name in ("run", "whole"))
    assert [x["loss"] for x in one] == pytest.approx(
        [x["loss"] for x in two], rel=tolerances.loss(4)
    )
    status, out = run(recipe, *common[3:6], "run.steps=5")
    assert status == 2 and "is your own (examples.towers.Towers), which" in out, out
    seen = (f"data.val={data.train}", "evaluate.linear_probe=null")
    given = (*common, *seen)
    status, out = run(recipe, *given, verb="evaluate")
    assert status == 0 and "image_to_text_R@1" in out, out
    checkpoints = tmp_path / "run" / "checkpoints"  # whose recipe nobody has given
    status, out = run(checkpoints, *seen, verb="evaluate")
    assert status == 2 and f"imported only if you name it: set {MODEL}" in out, out
    status, out = run(checkpoints, MODEL, *seen, verb="evaluate")
    assert status == 0 and "image_to_text_R@1" in out, out
    scores = [line for line in out.splitlines() if line.startswith("image_to_text")]

    status, out = run(checkpoints, "--format", "transformers", verb="export")
    assert status == 2 and "not examples.towers.Towers's: export with" in out, out
    status, out = run(
        checkpoints, "--output", str(tmp_path / "out"), verb="export"
    )  # imports nothing
    assert status == 0 and "safetensors.torch.load_file('" in out, out
    state = load_file(tmp_path / "out" / "open_clip_model.safetensors")
    plain = Towers()
    plain.load_state_dict(state)
    torch.manual_seed(3)
    assert torch.equal(state["visual.stem.weight"], Towers().visual.stem.weight)  # it is frozen
    status, out = run(tmp_path / "out", MODEL, *seen, verb="evaluate")
    assert status == 0 and [x for x in out.splitlines() if x in scores] == scores, out
    begun = (*common, "run.steps=1", "run.dir=more", f"model.init_from={tmp_path}/run")
    status, out = run(recipe, *begun)
    assert status == 0, out
    loaded = load(str(tmp_path / "out"), MODEL)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        image = plain.eval().visual((pixels / 255 - 0.5) / 0.5)
        text = plain.encode_text(byte_tokens(["a red square", "\u00e9"]))
    normalize = nn.functional.normalize
    torch.testing.assert_close(loaded.pixels(pixels), normalize(image, dim=-1))
    torch.testing.assert_close(loaded.texts(["a red square", "\u00e9"]), normalize(text, dim=-1))


@pytest.mark.engine
def test_a_loss_trains_and_is_another_run_than_any_other(recipe, tmp_path):
    common = (LOSS, "loss.options={weight: 2}", "run.steps=3", "schedule.warmup_steps=0")
    status, out = run(recipe, *common, "run.dir=one")
    assert status == 0, out
    status, out = run(recipe, *common, "run.dir=two", ranks=2)
    assert status == 0, out
    status, out = run(recipe, *common[:1], *common[2:], "run.dir=light")
    assert status == 0, out
    one, two, light = (
        [line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "two", "light")
    )
    assert two == pytest.approx(one, rel=tolerances.loss(3))
    assert light[0] == pytest.approx(one[0] / 2) and one[2] < one[0]
    longer = (*common[1:2], "run.steps=4", common[3], "run.dir=one")
    for other, key in (
        (("loss.kind=info_nce", "loss.options={}"), "loss.kind was"),
        ((LOSS, "loss.options={weight: 3}"), "loss.options was {'weight': 2}, is {'weight': 3}"),
    ):
        status, out = run(recipe, *longer, *other)
        assert status == 2 and "belongs to another run" in out and key in out, out
    status, out = run(recipe, LOSS, *longer)
    assert status == 0 and "resuming from step 3" in out, out


@pytest.mark.engine
def test_a_deterministic_run(recipe, tmp_path):
    """The environment and PyTorch are set before the first step; a CPU computes the same bits anyway."""
    common = (f"loss.kind={__name__}.Observed", "engine.kind=fsdp", "run.steps=6")
    lines = {}
    for wanted in ("true", "false"):
        status, out = run(recipe, *common, f"engine.deterministic={wanted}", f"run.dir=is-{wanted}")
        assert status == 0, out
        lines[wanted] = metrics(tmp_path / f"is-{wanted}")
    names = ("strict", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")
    assert [lines["true"][0][name] for name in names] == [1.0] * 4
    assert [lines["false"][0][name] for name in names] == [0.0] * 4
    assert all(line["PYTORCH_CUDA_ALLOC_CONF"] for line in (*lines["true"], *lines["false"]))
    for name in ("loss", "grad_norm"):
        assert [x[name] for x in lines["true"]] == [x[name] for x in lines["false"]]


class Probe(Callback):
    """Writes down what it sees, and fails in the second step, on the ranks that FAILS names."""

    def _write(self, *seen):
        with open(f"probe-{dist.rank()}", "a") as file:
            print(*seen, file=file)

    def after_step(self, record, keys, invalid):
        self._write("step", record["step"], len(keys))
        with pytest.raises(TypeError):
            record["loss"] = 0.0
        if record["step"] == 2 and str(dist.rank()) in os.environ.get("FAILS", ""):
            raise RuntimeError("no such thing")

    def before_save(self, state):
        self._write("save", state["step"])

    def after_evaluate(self, record):
        self._write("evaluate", record["samples_seen_by_own"])

    def close(self):
        self._write("close")


class Needy(Callback):
    def __init__(self, argument):
        self.argument = argument


def own_numbers(seen):
    assert len(seen.owners) == len(seen.text) and seen.owners.max() < len(seen.image)
    return {"samples_seen_by_own": len(seen.image)}


def no_numbers(seen):
    return seen.image


PROBE = f"log.callbacks=[{__name__}.Probe]"


@pytest.mark.engine
def test_callbacks_and_evaluations_of_ones_own(recipe, tmp_path, data, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    val = (f"data.val={data.train}", "evaluate.retrieval=false")
    functions = f"evaluate.functions=[{__name__}.own_numbers]"
    common = (PROBE, "run.steps=3", "schedule.warmup_steps=0", *val)
    status, out = run(recipe, *common, functions, ranks=2)
    assert status == 0, out
    assert "after_step of log.callbacks" in out and "RuntimeError: no such thing" in out, out
    assert "[rank 1] warning: after_step of log.callbacks" in out, out
    probe = f"after_step of log.callbacks ({__name__}.Probe)"
    told = f"rank 1: {probe} after step 2: RuntimeError: no such thing"
    verdict = read_verdict(tmp_path / "run")
    assert verdict is not None and verdict[1]["skipped"] == [told]
    for rank in range(2):
        seen = (tmp_path / f"probe-{rank}").read_text().split("\n")
        steps, rest = [x for x in seen if "step" in x], [x for x in seen if "step" not in x]
        assert [x.split()[1] for x in steps] == ["1", "2", "3"], seen
        assert "save 3" in rest and rest[-2] == "close", seen
        assert any(x.startswith("evaluate ") for x in rest), seen
    checkpoints = tmp_path / "run" / "checkpoints"  # whose recipe nobody has given
    status, out = run(checkpoints, *val, verb="evaluate")
    assert status == 0 and "samples_seen_by_own" not in out, out
    wrong = f"evaluate.functions=[{__name__}.no_numbers]"
    status, out = run(checkpoints, *val, wrong, verb="evaluate")
    assert status == 2 and f"evaluate.functions ({__name__}.no_numbers) failed" in out, out


@pytest.mark.engine
def test_a_schedule_trains(recipe, tmp_path):
    own = (HALF_LIFE, "schedule.options={half: 2}", "schedule.warmup_steps=2", "run.steps=6")
    status, out = run(recipe, *own)
    assert status == 0, out
    warm_up, decay = [5e-4, 1e-3], [1e-3 * 0.5 ** (step / 2) for step in range(2, 6)]
    assert [line["lr"] for line in metrics(tmp_path / "run")] == pytest.approx(warm_up + decay)


@pytest.mark.parametrize("verb", [("plan",), ("train", "--dry-run"), ("doctor",)])
def test_other_verbs_take_both(recipe, verb, capsys):
    own = (MODEL, "model.patch_dropout=null", "model.dropout=0", LOSS, "loss.options={weight: 2}")
    own = (
        *own,
        HALF_LIFE,
        "schedule.options={half: 2}",
        "batch.micro_size=auto",
        "batch.memory_limit=1GiB",
    )
    assert main([*verb, str(recipe), *own]) == 0, capsys.readouterr()


@pytest.mark.parametrize(
    "overrides, said",
    [
        (
            ("model.name=torch.nn.Linear",),
            "model.name (torch.nn.Linear): embed_dim: Field required; give",
        ),
        ((MODEL,), "model.patch_dropout (0.25): examples.towers.Towers builds its module without"),
        (
            (*OWN, "model.lock_image=true", "model.lock_image_unlocked_groups=1"),
            "_groups (1): examples.towers",
        ),
        ((*OWN, "model.init_logit_bias=-10"), "model.init_logit_bias (-10.0): examples.towers"),
        ((*OWN, "optim.layer_decay=0.5"), "the layers of examples.towers.Towers are not numbered"),
        (
            (*OWN, "engine.activation_checkpointing=true"),
            "object has no attribute 'set_grad_checkpointing'; it is called without arguments",
        ),
        ((*OWN[1:], wrong("Wide")), "Wide): embed_dim: Input should be a valid integer"),
        (
            (*OWN[1:], wrong("Wide")),
            "resize_mode: Input should be 'shortest', 'squash', 'longest' or 'native'",
        ),
        ((*OWN[1:], wrong("Wrong")), "Wrong) returned a scale [2]; return exp(logit_scale), [1]"),
        (
            (*OWN[1:], wrong("Wrong")),
            "Wrong) must return a bias if it has an attribute init_logit_bias",
        ),
        (
            (*OWN[1:], wrong("Narrow")),
            "Narrow) returned features [[2, 32], [2, 31], [2, 32], [2, 31]]",
        ),
        (
            (*OWN[1:], wrong("Words")),
            "a tokenizer that returned torch.float32 [2, 4] for 2 texts; return torch.int64 [2, 48]",
        ),
        (
            (*OWN[1:], wrong("Deaf")),
            "Deaf) failed on two samples on torch's meta device: TypeError: 'NoneType' object is not",
        ),
        (
            (*OWN[1:], wrong("Renormed")),
            "Renormed): visual.norm is a BatchNorm1d, whose statistics",
        ),
        (
            (*OWN[1:], "model.name=tests.launcher.test_own_code.silent"),
            "has no attribute 'register_forward",
        ),
        ((f"{LOSS}s",), "cannot be imported: module 'tests.launcher.test_own_code' has no"),
        (("loss.kind=torch.nn.Linear",), "is not a subclass of clip_train.task.Objective"),
        (
            (LOSS, "loss.options={height: 2}"),
            f"loss.options.height (2): no such key; {__name__}.Distance takes weight",
        ),
        (
            (BOUNDED, "loss.options={margin: 2, kind: hinge}"),
            "loss.options.margin (2) must be less than or equal to 1; set loss.options.margin=0.25 (the",
        ),
        (
            (BOUNDED, "loss.options={margin: 1}"),
            "loss.options.kind is missing; add it to the recipe, or loss.options.kind=... to the command",
        ),
        (
            (ANNOTATED, "loss.options={power: x, start: [1, 2, 3], mode: {}}"),
            "loss.options.power ('x') must be a valid integer",
        ),
        (
            (ANNOTATED, "loss.options={power: x, start: 1}"),
            "; loss.options.start (1) must be a valid tuple",
        ),
        (
            ("optim.name=torch.optim.RMSprop", "optim.options={alpha: high, beta: 1}"),
            "optim.options.alpha ('high') must be a valid number, unable to parse string as a number; "
            "set optim.options.alpha=0.99 (the default) or another; optim.options.beta (1): no such key",
        ),
        (
            (f"data.aug_own={__name__}.tilted", "data.aug_own_options={share: much}"),
            "data.aug_own_options.share ('much') must be a valid number",
        ),
        (("loss.options={weight: 2}",), "need an import path as loss.kind (it is info_nce)"),
        ((LOSS, "model.init_logit_bias=-10"), "does not use: set model.init_logit_bias=null"),
        ((f"loss.kind={__name__}.Biased",), "needs a model with a bias, and"),
        ((HALF_LIFE,), "schedule.options.half is missing; add it to the recipe"),
        (("schedule.options={half: 2}",), "need an import path as schedule.name (it is cosine)"),
        (("log.callbacks=[probe]",), "log.callbacks"),
        (("data.aug_own=torch.flatten",), "returned torch.uint8 [12288] for uint8 [3, 64, 64]"),
        (("data.aug_own=torch.nowhere",), "data.aug_own (torch.nowhere) cannot be imported"),
        (("data.aug_own_options={x: 1}",), "need data.aug_own; take them out"),
        ((f"schedule.name={__name__}.endless",), "endless) returned inf for the last step"),
    ],
)
def test_mistakes_are_said_before_anything_is_built(recipe, capsys, overrides, said):
    assert main(["plan", str(recipe), *overrides]) == 2
    assert said in capsys.readouterr().err


MARGIN = "loss.kind=my.losses.margin"
REFUSED = {
    "a path that does not exist": (
        ("loss.kind=my.losses.margins",),
        "loss.kind (my.losses.margins) cannot be imported: module 'my.losses' has no attribute "
        "'margins'; install it, or correct the path",
    ),
    "an option that does not exist": (
        (MARGIN, "loss.options={height: 2}"),
        "loss.options.height (2): no such key; my.losses.margin takes beta",
    ),
    "an option of another type": (
        (MARGIN, "loss.options={beta: much}"),
        "loss.options.beta ('much') must be a valid number, unable to parse string as a number; "
        "set loss.options.beta=0.5 (the default) or another",
    ),
    "a model without its attributes": (
        (*OWN[1:], wrong("silent_one")),
        "model.name (my.towers.build): embed_dim: Field required; give the function or class of "
        "your model these attributes: docs/extending.md",
    ),
    "a model with other features": (
        (*OWN[1:], wrong("Narrow")),
        "model.name (my.towers.build) returned features [[2, 32], [2, 31], [2, 32], [2, 31]]; its "
        "embed_dim asks for [2, 32]",
    ),
    "a tokenizer with other tokens": (
        (*OWN[1:], wrong("Words")),
        "model.name (my.towers.build) has a tokenizer that returned torch.float32 [2, 4] for 2 "
        "texts; return torch.int64 [2, 48], or change its context_length",
    ),
    "dropout of a model of one's own": (
        (*OWN[1:2], "model.dropout=0.1", wrong("Towers")),
        "model.dropout (0.1): my.towers.build builds its module without arguments; remove the key, "
        "and change the module",
    ),
    "another batch norm": (
        (*OWN[1:], wrong("Renormed")),
        "model.name (my.towers.build): visual.norm is a BatchNorm1d, whose statistics cannot be "
        "taken over a micro-batch of all ranks; choose another model",
    ),
    "layer decay": (
        (*OWN[1:], wrong("Towers"), "optim.layer_decay=0.5"),
        "optim.layer_decay (0.5): the layers of my.towers.build are not numbered as OpenCLIP's "
        "own; set optim.layer_decay=1, or ",
    ),
}


def silent_one():
    return None


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_refusal_names_key_value_and_remedy(recipe, capsys, monkeypatch, mistake):
    overrides, message = REFUSED[mistake]
    losses = ModuleType("my.losses")
    losses.margin = lambda image, text, scale, bias, rows, beta: image.sum()
    losses.margin.__signature__ = inspect.signature(hard_negatives)
    monkeypatch.setitem(sys.modules, "my", ModuleType("my"))
    monkeypatch.setitem(sys.modules, "my.losses", losses)
    assert main(["plan", str(recipe), *overrides]) == 2
    said = re.sub(rf"{__name__}\.\w+", "my.towers.build", capsys.readouterr().err)
    assert message in said


def test_images_by_name_are_prepared_as_by_place():
    torch.manual_seed(0)
    model = build_model(OwnModel.at("examples.towers.Towers")).eval()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    texts = byte_tokens(["a cat", "a dog"])
    image, text, *_ = model(images, texts)
    assert torch.equal(model(images=images, texts=None)[0], image)
    assert torch.equal(model(texts=texts, images=None)[1], text)


def test_a_model_that_cannot_be_imported_has_one_message():
    """As for a checkpoint, which has the attributes."""
    known = OwnModel.at("examples.towers.Towers")
    lost = known.model_copy(update={"own": "examples.nowhere.Towers"})
    with pytest.raises(
        UserError, match=r"^model.name \(examples.nowhere.Towers\) cannot be imported"
    ):
        build_model(lost)


def test_options_as_they_are_declared(capsys):
    """With the defaults of the model, and in the declared types; `keys` lists them."""
    for kind, options in (
        (BOUNDED, {"margin": "0.5", "kind": "hinge"}),
        (ANNOTATED, {"power": "2", "start": [1, 2]}),
    ):
        LossConfig(kind=kind.partition("=")[2], options=options).build()
    assert main(["keys", BOUNDED]) == main(["keys", ANNOTATED]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "loss.options.margin\t0.25\tfloat. of the cosines"
    assert out[1].startswith("loss.options.kind\trequired\t")
    assert [line.split("\t")[0].rpartition(".")[2] for line in out[2:]] == [
        "power",
        "start",
        "mode",
    ]
    with pytest.raises(UserError, match=r"loss.options.mode \(true\) must be"):
        checked_options("loss.kind", f"{__name__}.told", {"mode": True})


def test_a_callback_that_is_none_is_refused():
    (mistake,) = LogConfig(callbacks=[f"{__name__}.Wide"], tensorboard=False).mistakes_here()
    assert "Wide) is not a subclass of clip_train.callbacks.Callback" in mistake
    with pytest.raises(UserError, match=r"Needy\) cannot be made: .*'argument'"):
        own_callbacks(LogConfig(callbacks=[f"{__name__}.Needy"]), Skipped())


class Thermometer(Callback):
    """Ends the run where this node is too hot, or where OVER says so."""

    def after_step(self, record, keys, invalid):
        if record["step"] == 2 and os.environ.get("RANK", "0") == "1":
            raise RankError("the GPU has 95 degrees")
        if record["step"] == 2 and "OVER" in os.environ:
            raise DataError("these shards are used up")


@pytest.mark.engine
def test_the_error_of_a_callback_decides_how_the_run_ends(recipe, tmp_path):
    """It blames the node, and Slurm requeues; or it is an error that another attempt may not have."""
    thermometer = f"log.callbacks=[{__name__}.Thermometer]"
    status, out = finish(start(recipe, thermometer, ranks=2))
    word, why = read_verdict(tmp_path / "run")
    assert status == 2 and word == "FAILED" and why["blamed"] == node_name(), out
    assert why["reason"] == f"rank 1 on {node_name()}: the GPU has 95 degrees"
    status, out = finish(
        start(recipe, thermometer, f"run.dir={tmp_path / 'other'}", environ={"OVER": "1"})
    )
    word, why = read_verdict(tmp_path / "other")
    assert (status, word) == (1, "FAILED") and "blamed" not in why, out


class Counting(InfoNCE):
    """Keeps a number from step to step, by `state_dict` alone."""

    def state_dict(self):
        return {"seen": torch.zeros(1)}


class Restoring(InfoNCE):
    def load_state_dict(self, tensors, device):
        pass


@pytest.mark.parametrize("loss", [Counting, Restoring])
@pytest.mark.parametrize("views", [{"widths": {8: 1.0}}, {}])
def test_a_loss_with_a_state_has_one_view(loss, views):
    """Its state would be lost."""
    config = LossConfig(kind=f"{__name__}.{loss.__name__}", **views)
    with pytest.raises(UserError, match="keeps a state of one width"):
        config.build(texts_per_image=1 if views else 2)


def test_a_schedule_follows_the_warm_up():
    config = ScheduleConfig(name=f"{__name__}.half_life", options={"half": 4}, warmup_steps=1)
    assert [learning_rate(config, 1.0, step, 9) for step in (0, 4)] == [1.0, 0.5]
    with pytest.raises(UserError, match="half"):
        learning_rate(ScheduleConfig(name=config.name, warmup_steps=0), 1.0, 0, 9)
