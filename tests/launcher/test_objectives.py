"""Memory banks and a teacher through the real command."""

from __future__ import annotations

import shutil

import pytest

from clip_tools.plan import make_plan
from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.models.weights import export_openclip
from clip_train.recipe.recipe import check_config
from clip_train.recipe.resolve import resolve
from tests import tolerances
from tests.launcher.conftest import metrics, run
from tests.launcher.test_resume import told

BANKS = ("loss.kind=memory_bank", "loss.bank_size=80", "loss.bank_warmup_steps=3", "data.lanes=2")


@pytest.mark.engine
def test_banks_resume_bitwise_and_on_other_ranks_within_rounding(recipe, tmp_path):
    constant = "schedule.name=constant"  # does not depend on run.steps
    overrides = (*BANKS, "loss.bank_mode=contaccum", constant, "schedule.warmup_steps=2")
    for place, steps in (("straight", 9), ("same", 5)):
        status, out = run(recipe, *overrides, f"run.dir={place}", f"run.steps={steps}")
        assert status == 0, out
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    for place, ranks in (("same", 1), ("other", 2)):
        status, out = run(recipe, *overrides, f"run.dir={place}", "run.steps=9", ranks=ranks)
        assert status == 0 and "resuming from step 5" in out, out
    straight, same, other = (metrics(tmp_path / place) for place in ("straight", "same", "other"))
    assert [line["bank_entries"] for line in straight] == [0, 0, 0] + [80] * 6
    assert told(same) == told(straight)
    for key in ("loss", "bank_entries"):
        values = [line[key] for line in straight]
        assert [line[key] for line in same] == values
        assert [line[key] for line in other] == pytest.approx(values, rel=tolerances.loss(9))


@pytest.mark.engine
def test_a_teacher_from_an_export_folder(recipe, tmp_path, model):
    architecture = load_architecture(str(model))
    teacher = export_openclip(CLIP(architecture).state_dict(), architecture, tmp_path / "teacher")
    short = ("run.steps=3", "schedule.warmup_steps=0", f"model.teacher={teacher}", "data.lanes=2")
    curves = []
    for place, layout, ranks in (
        ("one", (), 1),
        ("two", ("engine.zero_stage=3", "batch.micro_size=5"), 2),
    ):
        status, out = run(recipe, *short, f"run.dir={place}", *layout, ranks=ranks)
        assert status == 0, out
        curves.append(
            [
                (line["loss"], line["clip_loss"], line["distill_loss"])
                for line in metrics(tmp_path / place)
            ]
        )
    one, two = ([x for line in curve for x in line] for curve in curves)
    assert one == pytest.approx(two, rel=tolerances.loss(3))
    assert one[0] == pytest.approx(one[1] + one[2], rel=1e-6)
    # another one in its place is not learnt from
    export_openclip(CLIP(architecture).state_dict(), architecture, teacher)
    for verb in ([], ["--dry-run"]):
        status, out = run(recipe, "run.steps=4", *short[1:], "run.dir=one", *verb)
        assert status != 0 and "belongs to another run: model.teacher (" in out, out
        assert "its digest was" in out
    status, out = run(recipe, "run.steps=4", *short[1:2], short[3], "run.dir=one")
    assert status != 0 and "belongs to another run: model.teacher (None): its digest was" in out, (
        out
    )
    status, out = run(
        recipe, "run.steps=4", *short[1:], "run.dir=one", "checkpoint.allow_changed_recipe=true"
    )
    assert status == 0 and "WARNING        this is a different run now: model.teacher" in out, out
    # a run as the teacher: its newest checkpoint, of which each node's first rank makes an export that all of it read
    named = (
        *short[:2],
        f"model.teacher={tmp_path / 'one'}",
        f"model.teacher_name={model}",
        "data.lanes=2",
    )
    status, out = run(recipe, *named, "run.dir=three", ranks=2)
    assert status == 0 and "): step 4 of" in out and "model.teacher (" in out, out
    assert metrics(tmp_path / "three")[0]["distill_loss"] > 0


MINIMAL = {"run": {"steps": 5000}, "data": {"train": "a.tar"}, "model": {"name": "tiny"}}


def test_what_does_not_fit_together_is_said():
    change = {"loss": {"kind": "memory_bank"}, "model": {"teacher": "somewhere"}}
    with pytest.raises(Exception, match=r"model\.teacher"):
        check_config(MINIMAL | change, "here")


TWO = {"model": {"name": "tiny", "teacher": ["a", "b"]}}
SHARDS = {"data": {"train": "a.tar", "reinforced": [8, 8]}}
FLIPPED = {"data": {"train": "a.tar", "reinforced": [], "aug_flip_prob": 0.5}}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model": {"teacher": ["a", "b"], "teacher_name": ["tiny"]}}, "each of the 2 teachers"),
        (TWO | {"loss": {"teacher_weights": [1]}}, r"loss.teacher_weights \(\[1.0\]\) must have one"),
        (SHARDS, r"loss.teacher_scales \(null\) must have one .* set loss.teacher_scales=\[100, 100"),
        (SHARDS | TWO | {"loss": {"teacher_scales": [9, 9]}}, "both name teachers"),
        (SHARDS | {"loss": {"teacher_scales": [9, 9], "exchange": "ring"}}, "with info_nce and ring"),
        (FLIPPED, r"take out data.aug_flip_prob"),
        ({"loss": {"distill_weights": [0, 1]}}, "need teachers: name them"),
    ],
)  # fmt: skip
def test_what_does_not_fit_teachers_is_refused(change, said):
    with pytest.raises(Exception, match=said):
        check_config(MINIMAL | change, "here")


def test_a_teacher_that_cannot_be_one_is_refused(tmp_path):
    def plan(**model):
        config = check_config(MINIMAL | {"model": {"name": "tiny", **model}}, "here")
        return make_plan(resolve(config, 1, read_data=False))

    with pytest.raises(
        Exception, match=r"model\.teacher \(nowhere\): no such file or folder; give"
    ):
        plan(teacher="nowhere")
    with pytest.raises(Exception, match=r"model\.teacher_name"):
        plan(teacher=str(tmp_path))
    for elsewhere in ("hf-hub:me/clip", "s3://bucket/export"):
        with pytest.raises(Exception, match=r"describes the model; set model\.teacher_name"):
            plan(teacher=elsewhere)
    for place, name in (
        (str(tmp_path), "ViT-B-32"),
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", None),
    ):
        with pytest.raises(Exception, match=r"image_size 224, the student 32"):
            plan(teacher=place, teacher_name=name)
    alone, taught = plan(), plan(teacher=str(tmp_path), teacher_name="tiny")
    assert taught["flops_per_step"] > alone["flops_per_step"]
    assert taught["memory_bytes"]["parameters"] == 2 * alone["memory_bytes"]["parameters"]
    two = plan(teacher=[str(tmp_path)] * 2, teacher_name="tiny")
    assert two["memory_bytes"]["parameters"] == 3 * alone["memory_bytes"]["parameters"]
    assert two["flops_per_step"] + alone["flops_per_step"] == 2 * taught["flops_per_step"]
