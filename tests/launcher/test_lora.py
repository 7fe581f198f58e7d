"""Adapters through the real command: trained on a base, resumed, exported."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.models.weights import export_openclip
from tests import tolerances
from tests.launcher.conftest import metrics, run


@pytest.mark.engine
def test_adapters_are_trained_resumed_and_merged(recipe, tmp_path, model, data):
    architecture = load_architecture(str(model))
    base = export_openclip(CLIP(architecture).state_dict(), architecture, tmp_path / "base")
    keys = (
        f"model.init_from={base}", "model.lora={rank: 2, dropout: 0.1}", "schedule.warmup_steps=0",
        "schedule.name=constant", "data.lanes=2", "checkpoint.every_steps=2",
    )  # fmt: skip
    for place, steps, layout, ranks in (
        ("one", 4, (), 1),
        ("two", 2, ("engine.zero_stage=3", "batch.micro_size=5"), 2),
        ("two", 4, ("engine.kind=fsdp", "engine.zero_stage=2"), 2),
    ):
        line = (*keys, f"run.dir={place}", f"run.steps={steps}", *layout)
        status, out = run(recipe, *line, ranks=ranks)
        assert status == 0, out
    one, two = ([line["loss"] for line in metrics(tmp_path / place)] for place in ("one", "two"))
    assert one == pytest.approx(two, rel=tolerances.loss(4))
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / "one").rglob("*.safetensors")),
        (base / "open_clip_model.safetensors").stat().st_size,
    ]
    assert sizes[0] < sizes[1] / 2  # two checkpoints, with the optimizer's state
    line = (*keys, "run.dir=one", "data.val=" + data.val)
    status, evaluated = run(recipe, *line, "evaluate.retrieval=false", verb="evaluate")
    assert status == 0, evaluated
    status, out = run(recipe, *line, verb="export")
    assert status == 0, out
    exported = tmp_path / "one" / "export"
    state = load_file(exported / "open_clip_model.safetensors")
    assert state.keys() == CLIP(architecture).state_dict().keys()
    place = (f"run.dir={tmp_path / 'x'}", "data.val=" + data.val, "evaluate.retrieval=false")
    status, out = run(exported, *place, verb="evaluate")
    assert status == 0 and out.split("val_loss: ")[1] == evaluated.split("val_loss: ")[1], out
    peft = ("--format", "peft", "--output", str(tmp_path / "peft"))
    status, out = run(recipe, *line, *peft, verb="export")
    assert status == 0 and (tmp_path / "peft" / "adapter_config.json").is_file(), out
    # another base in its place
    export_openclip(CLIP(architecture).state_dict(), architecture, base)
    for verb in ([], ["--dry-run"]):
        status, out = run(recipe, *keys, "run.dir=one", "run.steps=5", *verb)
        assert status != 0 and "belongs to another run: model.init_from (" in out, out
    status, out = run(recipe, *line, verb="export")
    assert status != 0 and "were trained on" in out and "model.init_from (" in out, out
