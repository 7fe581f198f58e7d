"""Mistakes in a recipe: one message that names field, value and remedy; exit status 2; no process group."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch.distributed as torch_dist
from PIL import Image

from clip_train.data.tar import write_shards
from clip_train.errors import RankError, UserError
from clip_train.models.weights import initial_weights
from clip_train.recipe.recipe import load_config, with_samples
from clip_train.recipe.resolve import resolve
from launcher.cli.main import main
from tests.launcher.conftest import run


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch):
    """Forming one is the failure that these tests look for."""

    def formed(*args, **kwargs):
        raise AssertionError("a process group was about to form")

    monkeypatch.setattr(torch_dist, "init_process_group", formed)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shards(tmp_path):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    jpg = buffer.getvalue()
    write_shards(tmp_path / "no_caption", [{"__key__": "a", "jpg": jpg}], 10)
    write_shards(
        tmp_path / "json_only",
        [{"__key__": "a", "jpg": jpg, "json": b'{"text": "x", "url": "y"}'}],
        10,
    )
    write_shards(tmp_path / "no_image", [{"__key__": "a", "txt": b"hello"}], 10)
    return tmp_path


# (overrides, what the message must say: the field, the value, the remedy)
MISTAKES = {
    "unknown key": (
        ["optim.learning_rate=1e-3"],
        ["optim.learning_rate", "0.001", "did you mean optim.lr?"],
    ),
    "another trainer's key": (
        ["batch.accum_freq=4"],
        ["batch.accum_freq", "4", "did you mean batch.micro_size?"],
    ),
    "half a word": (["optim.learnrate=1e-3"], ["optim.learnrate", "did you mean optim.lr?"]),
    "a table instead of shards": (
        ["data.train=cc3m.tsv"],
        ["data.train (cc3m.tsv)", "img2dataset --url_list cc3m.tsv"],
    ),
    "key without its section": (["lr=1e-3"], ["did you mean optim.lr?"]),
    "OpenCLIP's name": (
        ["batch_size=512"],
        ["batch_size", "512", "did you mean batch.global_size?"],
    ),
    "unknown section": (["optimizer.lr=1e-3"], ["optimizer", "did you mean optim?"]),
    "key in the wrong section": (
        ["run.micro_size=8"],
        ["run.micro_size", "did you mean batch.micro_size?"],
    ),
    "wrong type": (
        ["batch.global_size=many"],
        ["batch.global_size", "'many'", "valid integer", "set batch.global_size="],
    ),
    "out of range": (["optim.lr=-1"], ["optim.lr", "-1", "greater than 0", "set optim.lr="]),
    "no such choice": (["loss.kind=triplet"], ["loss.kind", "'triplet'", "info_nce"]),
    "a word for positions": (
        ["model.keep_positions=most"],
        ["model.keep_positions ('most')", "an integer >= 0, all or all_but_last"],
    ),
    "drawn positions without weights": (
        ["model.keep_positions=all", "model.context_length=99"],
        ["model.keep_positions (all) needs weights to start from"],
    ),
    "drawn positions that stay as drawn": (
        [
            "model.keep_positions=all",
            "model.context_length=99",
            "model.init_from={tmp}/x.pt",
            "model.lock_text=true",
        ],
        ["positional_embedding is not trained; set model.lock_text=false"],
    ),
    "not an override": (["optim.lr"], ["'optim.lr'", "write key.path=value"]),
    "batch schedule out of order": (
        ["batch.schedule=[{until_step: 9, global_size: 8}, {until_step: 5, global_size: 16}]"],
        ["batch.schedule", "[9, 5]", "sort them"],
    ),
    "unknown key in the batch schedule": (
        ["batch.schedule=[{until: 9, until_step: 9, global_size: 8}]"],
        ["batch.schedule.0.until (9)", "known keys are until_step, global_size"],
    ),
    "half a piece of the batch schedule": (
        ["batch.schedule=[{until_step: 9}]"],
        ["batch.schedule.0.global_size is missing", "or batch.schedule="],
    ),
    "a batch schedule that is a number": (
        ["batch.schedule=8"],
        ["batch.schedule (8)", "list", "set batch.schedule="],
    ),
    "no shards match": (
        ["data.train=/nowhere/*.tar"],
        ["data.train", "/nowhere/*.tar", "matches no"],
    ),
    "a table": (
        ["data.train=x.csv"],
        [
            "data.train (x.csv) is a table, not shards: `clip-train shards x.csv OUT`",
            "img2dataset",
            "{00000..00099}",
        ],
    ),
    "a folder": (
        ["data.train={tmp}"],
        ["is a folder, not shards", "/*.tar'", "clip-train shards", "OUT"],
    ),
    "missing shard": (
        ["data.train=/nowhere/{0..3}.tar"],
        ["data.train", "4 of 4 shards", "/nowhere/0.tar", "Correct the path"],
    ),
    "missing validation shard": (
        ["data.val=/nowhere/v.tar"],
        ["data.val (/nowhere/v.tar): 1 of 1 shards", "Correct the path"],
    ),
    "shell pipe": (
        ["data.train='pipe:cat x.tar'"],
        ["data.train", "pipe:cat x.tar", "give a path or a URL"],
    ),
    "missing captions": (
        ["data.train={tmp}/no_caption/*.tar"],
        ["data.train", "no_caption", "no caption", ".txt"],
    ),
    "captions in json": (
        ["data.train={tmp}/json_only/*.tar"],
        ["set data.caption_key", "text, url"],
    ),
    "wrong caption key": (
        ["data.train={tmp}/json_only/*.tar", "data.caption_key=alt"],
        ["data.caption_key (now alt)", "text, url"],
    ),
    "no images": (
        ["data.train={tmp}/no_image/*.tar"],
        ["data.train", "no image", "An image is one of jpg"],
    ),
    "refused stage and precision": (
        ["engine.zero_stage=0", "engine.precision=bf16"],
        ["engine.precision (bf16)", "engine.zero_stage 0", "use engine.zero_stage=1"],
    ),
    "sigmoid without a bias": (
        ["loss.kind=sigmoid"],
        ["loss.kind (sigmoid)", "set model.init_logit_bias=-10"],
    ),
    "a bias that a softmax cancels": (
        ["model.init_logit_bias=-10"],
        ["model.init_logit_bias", "loss.kind=sigmoid"],
    ),
    "a caption's weight without a decoder": (
        ["loss.caption_weight=1"],
        ["loss.caption_weight (1.0)", "loss.contrastive_weight (1.0)", "set loss.caption_weight=2"],
    ),
    "no loss at all": (
        ["loss.caption_weight=0", "loss.contrastive_weight=0"],
        ["are both 0", "set one of them to 1"],
    ),
    "a ring for a softmax": (
        ["loss.exchange=ring", "loss.kind=memory_bank"],
        ["loss.exchange (ring)", "set loss.exchange=gather"],
    ),
    "unknown model": (
        ["model.name=ViT-B-31"],
        ["model.name", "ViT-B-31", "did you mean", "ViT-B-32"],
    ),
    "a URL for a folder": (
        ["run.dir=s3://me:key@bucket/run"],
        ["run.dir (s3://REDACTED@bucket/run) takes a local folder", "checkpoint.remote"],
    ),
    "no length": (["run.steps=null"], ["exactly one of run.steps", "run.epochs"]),
    "epochs of an unknown size": (
        ["run.steps=null", "run.epochs=2"],
        ["run.epochs (2", "data.num_samples"],
    ),
    "warm-up longer than the run": (
        ["schedule.warmup_steps=50"],
        ["schedule.warmup_steps (50)", "40", "lower it"],
    ),
    "no labelled images": (
        ["evaluate.zero_shot_data={tmp}", "evaluate.zero_shot_classes=imagenet"],
        [
            "evaluate.zero_shot_data (",
            "no images in a folder for each class",
            "/*.tar",
        ],
    ),
    "labelled images elsewhere": (
        ["evaluate.zero_shot_data=/nowhere/val", "evaluate.zero_shot_classes=imagenet"],
        ["evaluate.zero_shot_data (/nowhere/val)", "do not exist", "Correct the path"],
    ),
    "labelled images for nothing": (
        ["evaluate.zero_shot_data=/nowhere/val"],
        [
            "evaluate.zero_shot_data ('/nowhere/val')",
            "set evaluate.zero_shot_classes as well",
        ],
    ),
    "a linear probe": (
        ["evaluate.linear_probe=/data/train"],
        [
            "evaluate.linear_probe ('/data/train') was removed: use clip-train evaluate PLACE --linear-probe"
        ],
    ),
    "classes elsewhere": (
        ["evaluate.zero_shot_classes=/nowhere"],
        ["evaluate.zero_shot_classes: /nowhere does not exist", "give imagenet"],
    ),
    "unknown DeepSpeed file": (["engine.ds_config=zero9"], ["engine.ds_config (zero9)", "zero1"]),
}


@pytest.mark.parametrize("overrides, said", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_message_with_status_2(overrides, said, recipe, shards, capsys):
    overrides = [o.replace("{tmp}", str(shards)) for o in overrides]
    assert main(["train", str(recipe), *overrides]) == 2
    err = capsys.readouterr().err
    assert err.count("] error:") == 1
    assert "Traceback" not in err
    for words in said:
        assert words in err, f"{words!r} is missing in: {err}"


@pytest.mark.parametrize("name", ["shell pipe", "a table"])
@pytest.mark.parametrize("key", ["data.train", "data.val"])
def test_a_plan_refuses_what_train_would(name, key, recipe, capsys):
    """Without looking for a single shard."""
    overrides, said = MISTAKES[name]
    assert main(["plan", str(recipe), "data.train=/nowhere/*.tar"]) == 0
    assert main(["plan", str(recipe), *(o.replace("data.train", key) for o in overrides)]) == 2
    err = capsys.readouterr().err
    assert all(words.replace("data.train", key) in err for words in said)
    assert err.count("data.train (") + err.count("data.val (") == 1  # of one key, that alone


@pytest.mark.parametrize(
    "overrides, said",
    [
        ([], "batch.global_size (32) must be at least the number of ranks (33)"),
        (
            ["batch.global_size=64", "batch.schedule=[{until_step: 3, global_size: 16}]"],
            "a size (16) must be at least",
        ),
    ],
)
def test_every_rank_needs_a_sample(overrides, said, recipe, capsys):
    assert main(["plan", str(recipe), *overrides, "--world-size", "33"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, environ, said",
    [
        (["data.train='pipe:cat x.tar'"], {}, "give a path or a URL"),
        (["data.val=val.csv"], {}, "data.val (val.csv) is a table"),
        (
            ["evaluate.zero_shot_data=x.csv", "evaluate.zero_shot_classes=imagenet"],
            {},
            "evaluate.zero_shot_data (x.csv) is a table",
        ),
        (["--world-size=0"], {}, "--world-size (0) must be at least 1"),
    ],
)
def test_a_plan_refuses_what_training_would(line, environ, said, recipe, capsys, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["plan", str(recipe), *line]) == 2
    assert said in capsys.readouterr().err


def test_an_epoch_of_other_data_is_a_mistake(recipe, data, tmp_path, capsys):
    """The index counts the samples; a number that is a little off is only a note."""
    shutil.copytree(Path(data.train).parent, tmp_path / "shards")
    train = f"data.train={tmp_path}/shards/*.tar"
    assert main(["index", train.partition("=")[2]]) == 0
    line = ["train", str(recipe), "--dry-run", train, "run.steps=null", "run.epochs=3"]
    for number, status in ((600, 0), (1000, 0), (10_000_000, 2)):
        capsys.readouterr()
        assert main([*line, f"data.num_samples={number}"]) == status
    err = capsys.readouterr().err
    assert "data.num_samples (10000000) is more than 2 times the 600 samples" in err
    assert main([*line, "data.num_samples=10000000", "data.resampled=true"]) == 0
    assert main([*line, "data.num_samples=10000000", "data.train_weights=[1]"]) == 0


@pytest.mark.parametrize("key", ["model.teacher", "model.init_from", "evaluate.zero_shot_classes"])
def test_a_missing_folder_blames_the_node_not_the_recipe(key, recipe, tmp_path):
    """So a job tries again, perhaps elsewhere; what is missing from its folder is a mistake."""
    for folder, kind in ((tmp_path / "unmounted", RankError), (tmp_path, UserError)):
        config = load_config(str(recipe), [f"{key}={folder}/x.json"])
        with pytest.raises(UserError, match=key.replace(".", r"\.")) as e:
            resolve(config, 1)
            initial_weights(config.model, 0, print)
        assert type(e.value) is kind


def test_samples_are_not_counted_on_a_mount_that_is_not_there(recipe, tmp_path):
    overrides = [
        "run.steps=null",
        "run.epochs=1",
        f"data.train={tmp_path}/unmounted/{{000..003}}.tar",
    ]
    with pytest.raises(RankError, match=r"4 of 4 shards do not exist.* mount it on"):
        with_samples(load_config(str(recipe), overrides))
    with pytest.raises(RankError, match=r"cannot read the recipe .* mount it on"):
        load_config(str(tmp_path / "unmounted" / "recipe.yaml"))


def test_the_demo_looks_at_its_overrides_before_it_draws(tmp_path, capsys):
    assert main(["demo", f"--dir={tmp_path}", "optim.lr=-1"]) == 2
    assert "optim.lr (-1)" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_all_mistakes_are_told_at_once(recipe, capsys):
    assert main(["train", str(recipe), "optim.lr=fast", "model.nam=x", "data.workers=-1"]) == 2
    err = capsys.readouterr().err
    assert "3 mistakes" in err
    assert all(path in err for path in ("optim.lr", "model.nam", "data.workers"))
    assert main(["train", str(recipe), "loss.kind=sigmoid", "engine.ds_config=zero9"]) == 2
    err = capsys.readouterr().err
    assert "loss.kind" in err and "engine.ds_config" in err


ONE_EACH = {  # the mistake -> words of its message
    "run.dir=s3://bucket/run": "run.dir (s3://bucket/run) takes a local folder",
    "run.epochs=3": "give exactly one of run.steps (it is 40) and run.epochs (it is 3.0)",
    "model.lock_text_unlocked_layers=2": "model.lock_text_unlocked_layers (2) has no effect",
    "model.lock_image_unlocked_groups=2": "model.lock_image_unlocked_groups (2) has no effect",
    "model.keep_positions=20": "model.keep_positions (20) needs weights to start from",
    "data.aug_scale=[2, 1]": "data.aug_scale (2.0, 1.0) must satisfy",
    "data.aug_ratio=[3, 1]": "data.aug_ratio (3.0, 1.0) must satisfy",
    "data.train_weights=[1, 2, 3]": "data.train_weights ([1.0, 2.0, 3.0]) must have one for each",
    "loss.options={a: 1}": "loss.options ({a: 1}) need an import path",
    "loss.group_role=positives": "loss.group_role (positives) needs loss.groups",
    "loss.distill_weights=[0, 1]": "loss.distill_weights ([0.0, 1.0]) need teachers",
    "optim.options={a: 1}": "optim.options ({a: 1}) go with an optim.name",
    "optim.ema_warmup=true": "optim.ema_warmup (true) needs optim.ema_decay",
    "schedule.options={a: 1}": "schedule.options ({a: 1}) need an import path",
    "checkpoint.remote=s3://": "checkpoint.remote: ",
    "engine.offload=optimizer": "engine.offload (optimizer) needs engine.zero_stage",
    "engine.reduce_dtype=bf16": "engine.reduce_dtype (bf16) needs engine.precision bf16",
    "engine.linear=fp8": "engine.linear (fp8) rounds bf16 activations",
    "evaluate.zero_shot_data=x": "evaluate.zero_shot_data ('x') is for zero-shot",
    "batch.schedule=[{until_step: 9, global_size: 8}, {until_step: 5, global_size: 8}]": "sort them",
    "optim.lr=-1": "optim.lr (-1) must be greater than 0",
    "batch.micro_size=x": "batch.micro_size ('x') must be",
    "log.progres=true": "did you mean log.progress?",
    "log.every_steps=often": "log.every_steps ('often') was removed: leave it out",
    "log.strict_callbacks=true": "log.strict_callbacks (true) was removed: leave it out",
    "launch.hang_start_seconds=60": "launch.hang_start_seconds (60) was removed: leave it out, or write",
    "launch.hang_step_seconds=60": "launch.hang_step_seconds (60) was removed: write launch.hang_seconds",
    "model.name=ViT-B-33": "model.name (ViT-B-33): no preset or file has this name",
    "data.train='a.csv::b.tar'": "data.train (a.csv) is a table",
    "data.val='pipe:cat x.tar'": "data.val (pipe:cat x.tar)",
}


def test_no_mistake_hides_another(recipe, capsys):
    """Single values, rules of one section, rules of the whole: each is reported, and nothing else."""
    settings = ["engine.zero_stage=0", "engine.precision=fp32"]
    assert main(["train", str(recipe), *settings, *ONE_EACH]) == 2
    err = capsys.readouterr().err
    assert f"{len(ONE_EACH)} mistakes" in err, err
    for mistake, words in ONE_EACH.items():
        assert words in err, f"{mistake}: {words!r} is missing in: {err}"


@pytest.mark.parametrize(
    "bad",
    ["optim.lr=-1", "schedule.name=7", "schedule.warmups=3", "data.lanes=x", "model.dropout=2"],
)
def test_a_bad_value_does_not_hide_the_rules_of_others(bad, recipe, capsys):
    rules = ["data.aug_scale=[2, 1]", "schedule.cooldown_steps=50", "optim.ema_warmup=true"]
    assert main(["train", str(recipe), bad, *rules]) == 2
    err = capsys.readouterr().err
    assert "4 mistakes" in err, err
    for words in (
        bad.split("=")[0],
        "data.aug_scale (2.0, 1.0)",
        "schedule.cooldown_steps (50)",
        "optim.ema_warmup",
    ):
        assert words in err


@pytest.mark.parametrize(
    "line",
    [
        ["run.stepz=5"],
        ["schedule.warmup_steps=x"],
        ["data.aug_scale=[2, x]"],
        ["optim.ema_decy=0.9", "optim.ema_warmup=true"],
        ["model.teacher=3", "loss.distill_weights=[0, 1]"],
    ],
)
def test_a_rule_does_not_judge_a_value_that_is_a_mistake(line, recipe, capsys):
    """run.stepz is not also a missing run.steps."""
    if "run.stepz" in line[0]:
        recipe.write_text(recipe.read_text().replace("steps: 40, ", ""))
    assert main(["train", str(recipe), *line]) == 2
    assert "1 mistake\n" in capsys.readouterr().err


def test_overrides_that_cannot_be_read_are_all_reported(recipe, capsys):
    assert main(["train", str(recipe), "optim.lr", "a..b=1", "run.seed=[", "data.val=x"]) == 2
    err = capsys.readouterr().err
    assert "3 mistakes" in err
    assert all(words in err for words in ("'optim.lr' is not", "'a..b=1' is not", "run.seed: '['"))


def test_keys_that_a_model_cannot_take_are_all_reported(recipe, capsys):
    line = ["model.name=examples.towers.Towers", "model.image_size=64"]
    assert main(["plan", str(recipe), *line]) == 2  # its model has a dropout of 0.1 as well
    err = capsys.readouterr().err
    assert "3 mistakes" in err, err
    assert all(f"model.{key} (" in err for key in ("dropout", "image_size", "patch_dropout"))


@pytest.mark.parametrize(
    "text, said",
    [
        ("run: [", "not YAML"),
        ("- a\n- b\n", "must hold sections"),
        ("run: {steps: 1}\nrun: {steps: 2}\n", "repeated key: run"),
    ],
)
def test_a_file_that_is_no_recipe(text, said, tmp_path, capsys):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert main(["train", str(file)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["checkpoints", "export"])
def test_a_run_that_is_not_there(verb, capsys):
    assert main([verb, "nowhere"]) == 2
    assert (
        "nowhere: no such file or folder; give a recipe, a run's folder, or a URL"
        in capsys.readouterr().err
    )


def test_a_recipe_that_is_not_there(capsys):
    assert main(["train", "nowhere.yaml"]) == 2
    assert "recipes/ has examples" in capsys.readouterr().err


@pytest.mark.engine
def test_two_ranks_tell_a_mistake_once(recipe):
    status, out = run(recipe, "data.train=/nowhere/*.tar", ranks=2)
    assert status == 2
    assert out.count("] error:") == 1, out


def test_a_dry_run_shows_the_plan_and_leaves_nothing(recipe, capsys):
    assert main(["train", str(recipe), "--dry-run", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks x" in out and "the first caption: '" in out and "nothing was started" in out
    assert not (recipe.parent / "run").exists()
    assert main(["train", str(recipe), "--dry-run", "data.train=missing.tar"]) == 2
    assert "1 of 1 shards do not exist" in capsys.readouterr().err
