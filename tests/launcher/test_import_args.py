"""`clip-train import-args`: every flag of OpenCLIP, and the command lines of its documents, which become recipes that
`plan` takes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from clip_tools.openclip.flags import (
    FLAGS,
    LISTS,
    MAIN_ONLY,
    OLDER,
    OLDER_KEYS,
    SWITCHES,
    meaning,
)
from clip_train.models.clip import state_shapes
from clip_train.models.config import load_architecture
from clip_train.optim.optimizer import lr_factors, without_decay
from clip_train.recipe.recipe import check_config
from launcher.cli.main import main

HERE = Path(__file__).parent / "openclip"
SCRIPTS, LINES_OF_4 = (
    dict(re.findall(r"^=== (.*)\n((?:(?!===).*\n)+)", (HERE / file).read_text(), re.M))
    for file in ("lines.txt", "lines_4.txt")
)
LINES = {
    name: re.sub(r"^(#SBATCH|EXP_NAME=).*\n", "", text, flags=re.M)
    for name, text in SCRIPTS.items()
}
RANKS = {
    "README.md, SLURM": "128",
    "docs/script_examples/stability_example.sh": "240",
}  # of #SBATCH
THEIRS = [line.split() for line in (HERE / "flags.txt").read_text().splitlines()[1:]]
KINDS = {name: kind for name, kind, _ in THEIRS}
RELEASED = {name for name, _, since in THEIRS if since == "3.3.0"}
BUILT_BY_OPENCLIP = ("open_clip:", "RN")
VIT = "--model ViT-B-32 --train-data x.tar --train-num-samples 3000000"
STABILITY = LINES["docs/script_examples/stability_example.sh"].replace(
    "${EXP_NAME}", "test-B-32-laion5b-lr1e-3-bs90k"
)
LINES["docs/script_examples/stability_example.sh"] = STABILITY
SLURM = LINES["README.md, SLURM"]
ONE_NODE = LINES["README.md, Single-Node"]


def imported(capsys, *line: str) -> tuple[dict, str]:
    assert main(["import-args", *line]) == 0
    text = capsys.readouterr().out
    check_config(yaml.safe_load(text), line[0])
    return yaml.safe_load(text), text


def imported_document(capsys, name: str) -> tuple[dict, str]:
    return (
        imported(capsys, LINES[name], "--world-size", RANKS[name])
        if name in RANKS
        else imported(capsys, LINES[name])
    )


PLANNED = [  # each takes seconds
    pytest.param(
        name,
        marks=()
        if name in ("README.md, SLURM", "docs/script_examples/stability_example.sh")
        else pytest.mark.full,
    )
    for name in sorted(LINES)
]


@pytest.mark.parametrize("name", PLANNED)
def test_a_documents_command_becomes_a_recipe_that_plan_takes(name, capsys, tmp_path):
    values, text = imported_document(capsys, name)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    if not values["model"]["name"].startswith(BUILT_BY_OPENCLIP):  # of which tests/peers has one
        assert main(["plan", str(recipe), "--world-size", "8", "--json"]) == 0


STEP_OF_CC12M = math.ceil(10968539 / (4 * 320))
CLIPA = {  # what its scripts share: 8 GPUs, an epoch that is saved and evaluated
    "optim.beta1": 0.9, "optim.beta2": 0.95, "optim.weight_decay": 0.2, "optim.grad_clip_norm": None,
    "data.train": "/path/to/laion-400m", "engine.precision": "bf16", "engine.activation_checkpointing": True,
    "evaluate.zero_shot_classes": "imagenet", "run.dir": "./logs-clip-train/clip", "checkpoint.every_minutes": 60,
}  # fmt: skip
JITTER = {
    "data.aug_scale": [0.4, 1.0], "data.aug_color_jitter": [0.32, 0.32, 0.32, 0.08], "data.aug_color_jitter_prob": 0.8,
    "data.aug_gray_scale_prob": 0.2,
}  # fmt: skip
# Of OpenCLIP's documents, by its own rules (params.py, main.py, data.py of 3.3.0): what each command trains.
MEANT = {
    "README.md, Sample single-process running code": {
        "model.name": "RN50", "batch.global_size": 128, "optim.lr": 1e-3, "optim.weight_decay": 0.1,
        "optim.beta2": 0.999, "optim.eps": 1e-8, "run.epochs": 30, "schedule.warmup_steps": 10000,
        "log.tensorboard": True, "log.wandb": False, "engine.precision": "bf16", "data.workers": 8,
        "data.train": "/path/to/train_data-shards/*.tar", "evaluate.zero_shot_classes": "imagenet",
        "evaluate.zero_shot_data": "/path/to/imagenet/root/val/", "run.dir": None, "model.init_from": None,
    },
    "README.md, Single-Node": {
        "model.name": "RN50", "batch.global_size": 4 * 320, "batch.micro_size": 320, "data.num_samples": 10968539,
        "run.epochs": 32, "checkpoint.every_steps": STEP_OF_CC12M, "checkpoint.keep_every": STEP_OF_CC12M,
        "checkpoint.every_minutes": 60, "evaluate.every_steps": 2 * STEP_OF_CC12M, "optim.weight_decay": 0.2,
    },
    "README.md, Multi-Node": {"batch.global_size": 4 * 320, "data.num_samples": 10968539},
    "README.md, SLURM": {
        "model.name": "ViT-B-32", "batch.global_size": 32 * 4 * 256, "optim.beta2": None, "optim.eps": None,
        "run.name": "ViT-B-32-Vanilla", "schedule.warmup_steps": 2000, "evaluate.every_steps": None,
        "data.train": "/data/LAION-400M/{00000..41455}.tar", "run.seed": 0,
    },
    "README.md, Resuming from a checkpoint": {"model.name": "RN50", "checkpoint.resume": None},
    "README.md, Fine Tuning CoCa": {
        "loss.contrastive_weight": 0, "loss.caption_weight": 1,
        "model.name": "open_clip:coca_ViT-L-14", "optim.lr": 1e-5, "log.wandb": True, "run.epochs": 1,
    },
    "README.md, Training with pre-trained language models as text encoder": {
        "model.name": "open_clip:roberta-ViT-B-32", "model.init_from": "roberta-ViT-B-32-start.pt",
        "model.lock_text": None, "model.lock_text_unlocked_layers": None, "data.num_samples": 3_000_000,
        "data.val": "s3://s-mas/cc3m/{00330..00331}.tar", "run.name": "10_unfrozen",
    },
    "README.md, Evaluating local checkpoint": {
        "model.name": "RN101", "model.init_from": "/path/to/checkpoints/epoch_K.pt",
        "data.val": "/path/to/validation_data-shards/*.tar",
    },
    "README.md, Evaluating hosted pretrained checkpoint": {
        "model.init_from": "open_clip:ViT-B-32-quickgelu/laion400m_e32", "evaluate.zero_shot_classes": "imagenet",
        "evaluate.zero_shot_data": "/path/to/imagenet/validation",
    },
    "docs/script_examples/clipa/vit_b16/i50_t16_finetune.sh": CLIPA | {
        "model.init_from": "/path/to/ckpt", "optim.lr": 2.56e-5, "run.epochs": 1,
        "batch.global_size": 8 * 1024, "schedule.warmup_steps": 3072, "data.num_samples": 131072000,
        "checkpoint.every_steps": 16000, "data.aug_scale": [0.4, 1.0], "data.aug_color_jitter": None,
    },
    "docs/script_examples/clipa/vit_b16/i50_t16_pretrain.sh": CLIPA | {
        "model.image_size": 112, "batch.global_size": 8 * 8192, "model.init_from": None,
    },
    "docs/script_examples/clipa/vit_l16/i17_t16_finetune.sh": CLIPA | JITTER,
    "docs/script_examples/clipa/vit_l16/i17_t16_pretrain.sh": CLIPA | JITTER | {
        "model.name": "open_clip:ViT-L-16-CL16-GAP", "model.image_size": 64,
    },
    "docs/script_examples/clipa/vit_l16/i37_t8_finetune.sh": CLIPA | JITTER | {"batch.global_size": 8 * 896},
    "docs/script_examples/clipa/vit_l16/i37_t8_pretrain.sh": CLIPA | JITTER | {"model.image_size": 96},
    "docs/script_examples/clipav2/vit_h14/i257_t32_finetunex4.sh": {
        **CLIPA, **JITTER, "data.train": "/path/to/laion2b_or_datacomp1b",
        "model.patch_dropout": 0.3, "model.image_size": 224, "checkpoint.every_steps": 4000,
    },
    "docs/script_examples/clipav2/vit_h14/i50_t8_pretrain.sh": {
        **CLIPA, **JITTER, "data.train": "/path/to/laion2b_or_datacomp1b", "data.num_samples": 400_000_000,
    },
    "docs/script_examples/clipav2/vit_h14/i577_t32_finetunex1.sh": {
        **CLIPA, **JITTER, "data.train": "/path/to/laion2b_or_datacomp1b", "model.patch_dropout": 0.4,
        "model.image_size": 336,
    },
    "docs/script_examples/stability_example.sh": {
        "batch.global_size": 240 * 375, "data.resampled": True, "data.train_weights": None, "run.epochs": 97,
        "run.dir": "/scratch/logs-clip-train/test-B-32-laion5b-lr1e-3-bs90k", "log.wandb_project": "open_clip6",
    },
    "scripts/clipav1_vit_l16_i37_t8.sh": { "model.init_from": "/path/to/clipa_vit_l16_i37_t8.pt", "run.dir": None,
    },
    "scripts/clipav2_vit_h14_i84_224_336_cl32_gap_datacomp1b.sh": {
        "model.image_size": 336,
    },
    "scripts/h14_224_32_finetune.sh": CLIPA | JITTER | {
        "data.train": "/path/to/laion", "run.name": "name", "run.dir": "./logs-clip-train/name",
        "log.wandb_project": "project_name", "batch.global_size": 8 * 4096, "run.epochs": 7,
    },
    "scripts/h14_84_8_pretrain.sh": CLIPA | JITTER | {
        "data.train": "/path/to/laion", "run.dir": "./logs-clip-train/name", "model.image_size": 84,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LINES))
def test_a_documents_command_means_what_openclip_trains(name, capsys):
    recipe, text = imported_document(capsys, name)
    found = {
        f"{section}.{key}": value for section in recipe for key, value in recipe[section].items()
    }
    meant = MEANT[name]
    assert {key: found.get(key) for key in meant} == meant
    given = set(re.findall(r"--([\w-]+)", LINES[name])) | {"world-size"}
    said = set(re.findall(r"^# --([\w-]+)", text, re.M))
    # what a recipe cannot do without, the precision that OpenCLIP takes without being asked, and
    # the flag without which it has another gradient
    assert said - given <= {"train-data", "train-num-samples", "precision", "gather-with-grad"}


SYNTHETIC = {
    "data.kind": "synthetic", "data.num_samples": 16, "data.train": None, "schedule.warmup_steps": 1,
    "optim.lr": 1e-3, "optim.weight_decay": 0.1, "run.epochs": 1, "checkpoint.every_steps": 4,
}  # fmt: skip
# What each becomes, with its warnings, or why it is refused.
OF_4 = {
    "tests/test_training_simple.py, training": (
        SYNTHETIC | {"model.name": "RN50", "batch.global_size": 4, "optim.beta2": 0.999}, set()
    ),
    "tests/test_training_simple.py, training_coca": (
        SYNTHETIC | {"model.name": "open_clip:coca_ViT-B-32", "loss.caption_weight": None}, set()
    ),
    "tests/test_training_simple.py, training_mt5": (
        SYNTHETIC | {
            "model.name": "open_clip:mt5-base-ViT-B-32", "model.init_from": "mt5-base-ViT-B-32-start.pt",
            "model.lock_text": None,
        },
        {"model", "lock-text"},
    ),
    "tests/test_training_simple.py, training_unfreezing_vit": (
        SYNTHETIC | {
            "model.name": "ViT-B-32", "model.lock_image": True, "model.lock_image_unlocked_groups": 5,
            "batch.global_size": 8, "batch.micro_size": 4, "checkpoint.every_steps": 2,
        },
        set(),
    ),
    "tests/test_params.py, opt_kwargs": (
        {"optim.name": "adamw", "optim.no_decay": None}, {"opt-kwargs", "wd", "train-data", "train-num-samples"}
    ),
    "tests/test_params.py, val_retrieval_precision": (
        {"model.name": "RN50", "engine.precision": "bf16"}, {"wd", "train-data", "train-num-samples"}
    ),
    "tests/test_naflex.py, naflex_args": "--use-naflex: images of native resolution (NaFlex) change the number of",
    "tests/test_naflex_timm_conversion.py, force_naflex_vision": "--force-naflex-vision: images of native resolution",
    "tests/test_naflex_audio_data.py, genlap": "--model naflexgenlap_test_1d cannot be trained here: it reads audio",
    "tests/test_naflexclap.py, naflexclap": "--model naflexclap_test cannot be trained here: it reads audio",
    "README.md, Evaluating CLAP on ESC-50": "--model CLAP-HTSAT-tiny-Roberta-base-fused cannot be trained here",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LINES_OF_4))
def test_a_command_of_openclip_4(name, capsys):
    meant = OF_4[name]
    if isinstance(meant, str):
        assert main(["import-args", LINES_OF_4[name]]) == 2
        assert meant in capsys.readouterr().err
        return
    keys, warned = meant
    recipe, text = imported(capsys, LINES_OF_4[name], "--world-size", "1")
    found = {
        f"{section}.{key}": value for section in recipe for key, value in recipe[section].items()
    }
    assert {key: found.get(key) for key in keys} == keys
    assert set(re.findall(r"^# --([\w-]+): CHECK: ", text, re.M)) == warned


# Of a flag that needs others, and where 1 would be no value of it, or OpenCLIP's own.
BESIDES = {
    "fsdp-offload-cpu": "--fsdp", "fsdp-no-reshard-after-forward": "--fsdp", "json-text-key-probs": "--json-text-key a",
    "lock-image-unlocked-groups": "--lock-image", "lock-image-freeze-bn-stats": "--lock-image",
    "lock-text-unlocked-layers": "--lock-text", "zeroshot-frequency": "--val-frequency 2",
    "train-data-upsampling-factors": "--dataset-resampled",
    "distill-model": "--distill-pretrained laion2b", "distill-pretrained": "--distill-model ViT-L-14",
}  # fmt: skip
VALUES = {
    "accum-freq": "2", "aug-cfg": "scale='(0.4, 1.0)'", "beta1": "0.5", "beta2": "0.5", "dataset-type": "synthetic",
    "force-image-size": "64", "force-patch-dropout": "0.5", "lr-cooldown-power": "2", "lr-scheduler": "const",
    "model": "ViT-B-16", "momentum": "0.5",
    "image-layer-decay": "0.8", "text-layer-decay": "0.8", "visual-layer-decay": "0.8", "image-resize-mode": "squash",
    "opt-kwargs": "a=1", "opt": "muon", "precision": "fp32", "pretrained": "openai",
    "report-to": "wandb",
    "save-frequency": "2", "train-data-upsampling-factors": "1::2", "val-frequency": "2",
}  # fmt: skip


# They change what is printed, stored, evaluated or how fast it is, not what is trained.
HARMLESS = {
    "audio-ext", "audio-fill", "audio-fusion", "audio-int16-normalize", "audio-layer-decay",
    "audio-multiprocessing-context", "audio-trunc", "audio-zeroshot-audio-key", "audio-zeroshot-class-key",
    "audio-zeroshot-dataset", "audio-zeroshot-multiprocessing-context", "audio-zeroshot-split",
    "audio-zeroshot-target-key", "audio-zeroshot-template", "audio-zeroshot-workers", "pretrained-audio",
    "bucket-chunk", "bucket-pool", "bucket-prefetch-pools", "cache-dir", "copy-codebase", "csv-caption-key",
    "csv-img-key", "csv-separator", "ddp-static-graph", "debug", "device", "dist-backend", "dist-url",
    "force-custom-text", "fsdp-checkpoint", "horovod", "imagenet-v2", "lock-text-freeze-layer-norm",
    "log-every-n-steps", "log-local",
    "log-metric-every-n-steps", "naflex-batch-divisor", "naflex-loss-scale", "naflex-max-text-tokens",
    "naflex-max-tokens-per-batch", "naflex-num-train-image-tokens", "naflex-pad-multiple", "naflex-patch-size-probs",
    "naflex-patch-sizes", "naflex-seq-len-probs", "naflex-seq-lens", "no-set-device-rank", "remote-sync-frequency",
    "remote-sync-protocol", "save-most-recent", "text-pad-multiple", "torchcompile-backend", "torchcompile-mode",
    "torchcompile-strategy", "torchscript", "trace", "train-loss-ema-samples", "val-num-samples",
    "val-retrieval-chunk-size", "val-retrieval-precision", "wandb-notes",
    # always on, with the gradient of the global batch
    "gather-with-grad", "local-loss", "use-bn-sync",
}  # fmt: skip
# Flags that do nothing in OpenCLIP beside the others of the line below.
IDLE = {
    "coca-caption-loss-weight", "coca-contrastive-loss-weight", "epochs-cooldown", "loss-dist-impl",
    "length-bucketing", "lr-cooldown-end", "lr-cooldown-power", "text-pooler-own-group",
}  # fmt: skip


@pytest.mark.parametrize("flag", sorted(KINDS))
def test_each_flag_is_in_the_recipe_or_warned_of_or_refused(flag, capsys):
    given = VALUES.get(flag, "1") if KINDS[flag] != "switch" else ""
    plain = f"main.py {BESIDES.get(flag, '')} --train-data a.tar::b.tar --train-num-samples 4000000 --val-data v.tar"
    before, _ = imported(capsys, f"{plain} --imagenet-val val")
    status = main(["import-args", f"{plain} --imagenet-val val --{flag} {given}"])
    text, err = capsys.readouterr()
    if status == 2:
        assert f"--{flag}" in err
        return
    (said,) = [line for line in text.splitlines() if line.startswith(f"# --{flag}: ")] or [""]
    if flag in HARMLESS | IDLE:
        assert said and "CHECK" not in said
    else:
        assert yaml.safe_load(text) != before or "CHECK" in said


def test_each_flag_is_the_switch_or_value_that_it_is():
    older = OLDER.keys() | OLDER_KEYS.keys()
    assert KINDS.keys() == FLAGS - older and len(KINDS) == 143 + 3
    assert {name for name, kind in KINDS.items() if kind == "switch"} == SWITCHES - older
    assert {name for name, kind in KINDS.items() if kind == "list"} == LISTS
    assert {*KINDS} - RELEASED == MAIN_ONLY


def test_the_page_has_every_flag():
    page = (Path(__file__).resolve().parents[2] / "docs" / "from_openclip.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|", 1)]
        for line in page.splitlines()
        if "| `--" in line
    ]
    flags = [(flag, text) for names, text in rows for flag in re.findall(r"`--([^`]*)`", names)]
    assert dict(flags) == {flag: meaning(flag) for flag in FLAGS}
    assert len(flags) == len(FLAGS) and len(RELEASED) == 90


def test_a_batch_is_that_of_all_gpus_and_micro_batches(capsys):
    recipe, _ = imported(
        capsys, f"torchrun --nproc_per_node 8 -m main {VIT} --batch-size 128 --accum-freq 4"
    )
    assert recipe["batch"] == {"global_size": 8 * 128 * 4, "micro_size": 128}
    recipe, text = imported(capsys, SLURM)
    assert recipe["batch"]["global_size"] == 256 and "add --world-size N" in text
    assert imported(capsys, SLURM, "--world-size", "16")[0]["batch"]["global_size"] == 4096
    for start in (
        "mpirun -np 16 python",
        "srun -n 16 python",
        "srun --ntasks=16 python",
        "torchrun --nnode 2 --nproc-per-node=8",
    ):
        assert imported(capsys, f"{start} -m main {VIT}")[0]["batch"]["global_size"] == 16 * 64, (
            start
        )


RANKS_OF = {
    "srun --ntasks=32 --ntasks-per-node=8 python": 32,
    "srun -n 32 --ntasks-per-node=8 python": 32,
    "srun -n32 nice -n 10 python": 32,
    "srun -N 4 --ntasks-per-node=8 python": 32,
    "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n# main\nsrun -u python": 32,
    "torchrun --nnodes=4 --nproc_per_node=8": 32,
    "srun -N 4 torchrun --nproc_per_node 8": 32,
    "srun -p main -N 1 torchrun --nproc_per_node 8": 8,
    "srun --ntasks-per-node=8 python": None,
    "srun --ntasks=$N python": None,
    "torchrun --nnodes $NN --nproc_per_node 8": None,
    "torchrun --nnodes=1:4 --nproc-per-node=8": None,
    "torchrun --nproc_per_node=gpu": None,
    "nice -n 15 python": None,
}


@pytest.mark.parametrize(("start", "ranks"), RANKS_OF.items())
def test_the_number_of_ranks_is_the_launchers_or_unknown(start, ranks, capsys):
    recipe, text = imported(capsys, f"{start} -m open_clip_train.main {VIT}")
    assert recipe["batch"]["global_size"] == 64 * (ranks or 1)
    assert ("# --world-size: CHECK: this command does not give" in text) == (ranks is None)


@pytest.mark.parametrize(
    "line",
    [
        "cd /home/me/main && torchrun --nproc_per_node 8 -m open_clip_train.main",
        "cd /home/me/main\ntorchrun --nproc_per_node 8 -m open_clip_train.main",
        "git checkout main; torchrun --nproc_per_node 8 -m training.main",
        "git commit -m main; torchrun --nproc_per_node 8 -m main",
        "srun -p main torchrun --nproc_per_node 8 src/open_clip_train/main.py",
    ],
)
def test_only_openclips_program_begins_the_flags(line, capsys):
    recipe, _ = imported(capsys, f"{line} {VIT} --name main --epochs 3; python main.py --epochs 4")
    assert recipe["batch"]["global_size"] == 8 * 64
    assert recipe["model"]["name"] == "ViT-B-32"
    assert recipe["run"] == {"name": "main", "epochs": 3, "seed": 0}
    recipe, _ = imported(capsys, f"cd /home/me/main && {VIT} --name main --epochs 3 | tee log")
    assert (recipe["run"]["name"], recipe["run"]["epochs"]) == ("main", 3)


@pytest.mark.parametrize(
    "flag", ["--pretrained ''", '--name ""', "--val-data ''", "--imagenet-val ''"]
)
def test_an_empty_value_is_as_no_flag(flag, capsys):
    without, _ = imported(capsys, f"main.py {VIT} --epochs 3")
    assert imported(capsys, f"main.py {VIT} {flag} --epochs 3")[0] == without


def test_empty_logs_are_the_current_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, _ = imported(capsys, f"main.py {VIT} --logs '' --epochs 3")
    assert recipe["run"] == {"epochs": 3, "seed": 0, "dir": f"{tmp_path}-clip-train/clip"}


def test_what_differs_is_said(capsys):
    recipe, text = imported(capsys, STABILITY, "--world-size", "240")
    assert recipe["data"]["train"].startswith(
        "s3://s-datasets/laion5b/{laion2B-data/{000000..231349}.tar,laion2B-multi"
    )
    assert recipe["data"]["train"].endswith("{000000..127231}.tar}")
    name = "test-B-32-laion5b-lr1e-3-bs90k"
    assert recipe["run"]["name"] == name
    assert recipe["checkpoint"]["remote"] == f"s3://s-laion/mitchellw/logs-clip-train/{name}"
    assert recipe["optim"]["grad_clip_norm"] is None and recipe["optim"]["lr"] == 1e-3
    assert recipe["checkpoint"]["every_steps"] == math.ceil(135646078 / 90000)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    for flag in (
        "--local-loss",
        "--gather-with-grad",
        "--resume",
        "--ddp-static-graph",
        "--train-data",
    ):
        assert any(line.startswith(f"# {flag}: ") for line in comments), flag
    assert any("empty captions" in line for line in comments)
    recipe, _ = imported(
        capsys, f"torchrun -m main {VIT} --siglip --loss-dist-impl gather --lr 5e-4"
    )
    assert recipe["loss"] == {"kind": "sigmoid", "exchange": "gather"}
    assert recipe["model"] == {
        "name": "ViT-B-32",
        "init_logit_bias": -10.0,
        "init_logit_scale": math.log(10),
    }
    taught, _ = imported(
        capsys, f"main.py {VIT} --distill-model ViT-L/14 --distill-pretrained laion2b_s32b_b82k"
    )
    assert taught["model"]["teacher"] == "open_clip:ViT-L-14/laion2b_s32b_b82k"
    assert taught["model"]["teacher_name"] == "ViT-L-14"
    two = "--train-data 'a/{0..9}.tar::pipe:aws s3 cp s3://b/{0..9}.tar -' --dataset-resampled"
    recipe, _ = imported(
        capsys, f"main.py --train-num-samples 9e9 {two} --train_data_upsampling_factors=1::2"
    )
    assert (
        recipe["data"]["train_weights"] == [10, 20]
        and recipe["data"]["num_samples"] == 9_000_000_000
    )
    assert recipe["data"]["train"] == "a/{0..9}.tar::s3://b/{0..9}.tar"
    quoted = """--train-data 'pipe:curl -s "https://x/{0..9}.tar"'"""
    assert imported(capsys, f"main.py {quoted}")[0]["data"]["train"] == "https://x/{0..9}.tar"


@pytest.mark.parametrize(
    ("sources", "factors", "weights"),
    [
        ("A{000..899}.tar::B{000..099}.tar", "1::3", [900, 300]),
        ("A{0..1}{0..4}.tar::B{08,15}.tar::C.tar", "0.5::2::7", [5, 4, 7]),
        ("A*.tar::C{0..3}.tar", "1::3", [1, 12]),
    ],
)
def test_a_source_weighs_as_its_shards_weigh_in_openclip(capsys, sources, factors, weights):
    """Its `ResampledShards2` draws each shard with its source's factor."""
    line = f"main.py {VIT} --train-data '{sources}' --dataset-resampled"
    recipe, text = imported(capsys, f"{line} --train-data-upsampling-factors {factors}")
    assert recipe["data"]["train_weights"] == pytest.approx(weights)
    unknown = re.search(r"# --train-data-upsampling-factors: CHECK.* is not known here", text)
    assert bool(unknown) == ("*" in sources)


def test_a_factor_without_a_source_is_refused(capsys):
    line = f"main.py {VIT} --train-data A{{0..9}}.tar::B.tar --dataset-resampled"
    for factors in ("1::2::3", "1", "1::x"):
        assert main(["import-args", f"{line} --train-data-upsampling-factors {factors}"]) == 2
        assert "data.train_weights" in capsys.readouterr().err


def test_evaluation_is_as_often(capsys):
    """OpenCLIP's zero-shot runs every second epoch unless told otherwise; 0 is never, of saves but at the end."""
    found = imported(capsys, ONE_NODE)[0]["evaluate"]
    epoch = math.ceil(10968539 / (4 * 320))
    assert found == {
        "zero_shot_data": "/data/imagenet/validation/", "zero_shot_classes": "imagenet", "every_steps": 2 * epoch
    }  # fmt: skip
    assert (
        imported(capsys, f"{ONE_NODE.rstrip()} --val-data v.tar")[0]["evaluate"]["every_steps"]
        == epoch
    )
    recipe, _ = imported(capsys, f"{ONE_NODE.rstrip()} --zeroshot-frequency 0 --save-frequency 0")
    assert "every_steps" not in recipe["evaluate"] and recipe["checkpoint"]["every_steps"] is None
    recipe, _ = imported(capsys, f"{ONE_NODE.rstrip()} --save-frequency -1")
    assert recipe["checkpoint"] == {"every_minutes": 60, "every_steps": None}


def test_a_table_becomes_shards_first(capsys):
    recipe, text = imported(capsys, LINES["README.md, Sample single-process running code"])
    assert recipe["data"]["train"] == "/path/to/train_data-shards/*.tar"
    assert recipe["data"]["val"] == "/path/to/validation_data-shards/*.tar"
    command = (
        "clip-train shards /path/to/train_data.csv /path/to/train_data-shards "
        "--image-key filepath --caption-key title"
    )
    assert f"# --train-data: first make shards of it: {command}\n" in text
    assert "# --train-num-samples: CHECK: is not given, so keys that count epochs in steps" in text
    assert "num_samples" not in recipe["data"] and "every_steps" not in recipe["checkpoint"]
    assert "414,560,000 samples are ASSUMED" in imported(capsys, SLURM)[1]


def table(file: Path, rows: int, separator: str = "\t") -> str:
    """With a caption of two lines, as a spreadsheet writes it."""
    lines = [f'img/{i}.jpg{separator}"a picture\nof {i}"' for i in range(rows)]
    file.write_text("\n".join([f"filepath{separator}title", *lines]) + "\n")
    return str(file)


@pytest.mark.parametrize("name, separator", [("a.csv", ","), ("a.csv", "\t"), ("a.tsv", "\t")])
def test_the_rows_of_a_table_are_counted(name, separator, capsys, tmp_path):
    line = f"main.py --model ViT-B-32 --train-data {table(tmp_path / name, 785, separator)}"
    recipe, text = imported(capsys, f"{line} --batch-size 128 --epochs 30 --warmup 10")
    assert recipe["data"]["num_samples"] == 785 and recipe["run"]["epochs"] == 30
    assert recipe["checkpoint"]["every_steps"] == recipe["checkpoint"]["keep_every"] == 7
    assert "--train-num-samples" not in text
    recipe, text = imported(capsys, f"{line} --train-num-samples 12000000 --warmup 10")
    assert recipe["data"]["num_samples"] == 785
    assert (
        "# --train-num-samples: OpenCLIP does not read it for a table, which has 785 rows" in text
    )
    assert "# --warmup: CHECK: 10000 is more than the " in imported(capsys, line)[1]


@pytest.mark.parametrize("data", ["nowhere.csv", "shards/*.tar", "one.tar"])
def test_an_epoch_that_nobody_has_counted_is_left_out(data, capsys):
    line = f"main.py --model ViT-B-32 --train-data {data} --val-data v.tar --epochs-cooldown 2"
    recipe, text = imported(capsys, f"{line} --lr-scheduler const-cooldown --warmup 500")
    assert "num_samples" not in recipe["data"] and recipe["run"]["epochs"] == 32
    assert recipe["schedule"] == {"warmup_steps": 500, "name": "constant-with-cooldown"}
    assert recipe["checkpoint"] == {"every_minutes": 60}
    assert "# --train-num-samples: CHECK: is not given" in text


@pytest.mark.parametrize("end", ["\\", "^", "`", "\\ ", "^\r"])
def test_a_line_goes_on_as_in_any_shell(end, capsys):
    line = VIT.replace(" --", f" {end}\n    --")
    assert imported(capsys, f"main.py {line} --lr 1e-3") == imported(
        capsys, f"main.py {VIT} --lr 1e-3"
    )


def test_matryoshka_of_openclips_branch(capsys):
    line = f"main.py {VIT} --force_mrl_loss --mrl_dim_to_consider 512,256,64"
    weighted = f"{line} --mrl_loss_weights 1,0.5,0.25"
    assert imported(capsys, weighted)[0]["loss"]["widths"] == {512: 1, 256: 0.5, 64: 0.25}
    assert imported(capsys, line)[0]["loss"]["widths"] == {512: 1, 256: 1, 64: 1}
    _, text = imported(capsys, f"main.py {VIT} --mrl-loss-weights 1,1")
    assert "# --mrl-loss-weights: does nothing there without --force-mrl-loss" in text
    assert "CHECK: --mrl-dim" in imported(capsys, f"main.py {VIT} --force-mrl-loss")[1]
    assert main(["import-args", f"{line} --mrl_loss_weights 1,1"]) == 2
    assert "--mrl-loss-weights (1,1) must have a weight for each" in capsys.readouterr().err


def test_the_type_is_explained_without_its_flag(capsys):
    default = (
        "# --precision amp: the default of OpenCLIP 3.3.0; bf16 here, as in 4.x, with fp32 master"
    )
    assert default in imported(capsys, f"main.py {VIT}")[1]
    assert "# --precision" not in imported(capsys, f"main.py {VIT} --text-key txt")[1]
    given = "# --precision amp: CHECK: computes in fp16 there and in bf16 here"
    assert given in imported(capsys, f"main.py {VIT} --precision amp")[1]
    assert "# --precision" not in imported(capsys, f"main.py {VIT} --precision amp_bf16")[1]
    for name in ("bf16", "pure_bf16", "fp16", "pure_fp16"):
        _, text = imported(capsys, f"main.py {VIT} --precision {name}")
        assert (
            f"# --precision {name}: CHECK: OpenCLIP's weights and moments are {name[-4:]}" in text
        )


CHANGED = {  # flags that a recipe cannot express, and that train something else
    "--pretrained-image": "pretrained-image",
    "--image-mean 0.5 0.5 0.5": "image-mean",
    "--image-std 0.5 0.5 0.5": "image-std",
    "--image-interpolation random": "image-interpolation",
    "--square-resize-only": "square-resize-only",
    "--model convnext_base --visual-layer-decay 0.8": "visual-layer-decay",
    "--model convnext_base --force-quick-gelu": "force-quick-gelu",
    "--model ViT-B-16-SigLIP --image-mean 0.48145466 0.4578275 0.40821073": "image-mean",
    "--model moderntext-ViT-B-32-256 --length-bucketing": "length-bucketing",
    "--model moderntext-ViT-B-32-256 --lock-text --text-pooler-own-group": "text-pooler-own-group",
    "--model ViT-B-16-SigLIP --wd-exclude a": "wd",
    "--opt timm/sgd --lr 1": "opt timm/sgd",
    "--opt timm/adamw": "lr",
    "--precision amp": "precision amp",
    "--opt-kwargs nesterov=True": "opt-kwargs",
    "--opt-fallback-list a b": "opt-fallback-list",
    "--use-bnb-linear SwitchBackLinear": "use-bnb-linear",
    "--hf-tokenizer-name x": "hf-tokenizer-name",
    "--resume epoch_3.pt": "resume",
    "--image-key picture": "image-key",
    "--image-key png": "image-key",
    "--report-to trackio": "report-to",
    "--aug-cfg use_timm=True re_prob=0.1": "aug-cfg re_prob",
    "--warmup 99999999": "warmup",
    "--max-image-pixels 1000": "max-image-pixels",
}


@pytest.mark.parametrize("given, flag", CHANGED.items())
def test_a_flag_that_changes_the_training_is_to_be_checked(given, flag, capsys):
    assert main(["import-args", f"main.py {VIT} {given}"]) == 0
    out, err = capsys.readouterr()
    assert f"# --{flag}: CHECK: " in out and f"warning: --{flag}: " in err


@pytest.mark.parametrize(
    "given",
    [
        "--image-mean 0.48145466 0.4578275 0.40821073 --image-std 0.26862954 0.26130258 0.27577711",
        "--image-interpolation bicubic --image-resize-mode shortest --image-key 'jpg;png;jpeg;webp'",
        "--naflex-patch-sizes 16 --naflex-seq-lens 128",
        "--resume latest --val-retrieval-precision fp32 --fsdp-checkpoint sharded",
        "--text-layer-decay 0.8 --image-layer-decay 0.8",
        "--pretrained openai --pretrained-image",
    ],
)
def test_a_flag_that_changes_nothing_is_not_to_be_checked(given, capsys):
    assert "CHECK" not in imported(capsys, f"torchrun --nproc_per_node 2 main.py {VIT} {given}")[1]


def test_flags_that_openclip_ignores_are_ignored(capsys):
    recipe, text = imported(capsys, f"main.py {VIT} --lr-cooldown-end 1e-5 --epochs-cooldown 3")
    assert recipe["schedule"] == {"warmup_steps": 10000, "name": "cosine"}
    assert "# --lr-cooldown-end: does nothing there with --lr-scheduler cosine" in text
    given = "--lr-scheduler const-cooldown --lr-cooldown-end 1e-5 --epochs-cooldown 3"
    recipe, _ = imported(capsys, f"main.py {VIT} {given}")
    assert recipe["schedule"]["final_lr"] == 1e-5
    assert recipe["schedule"]["cooldown_steps"] == 3 * math.ceil(3_000_000 / 64)
    for flag in ("--lock-image-unlocked-groups 2", "--lock-text-unlocked-layers 2"):
        recipe, text = imported(capsys, f"main.py {VIT} {flag}")
        assert recipe["model"] == {"name": "ViT-B-32"}
        assert f"# {flag[:-2]}: does nothing there without --lock-" in text


def rates_in_openclip(name: str, image: float, text: float) -> float:
    """By its groups (`layer_groups`): the projections; the last block with the norm behind it; the other blocks; the
    embeddings. The factor is the tower's decay once for each group above. ViT-B-32 has 12 blocks in each tower."""
    decay = image if name.startswith("visual.") else text
    if name in ("logit_scale", "visual.proj", "text_projection"):
        return 1.0
    block = re.search(r"resblocks\.(\d+)", name)
    if block is not None:
        return decay ** (12 - int(block[1]))
    return decay if "ln_post" in name or "ln_final" in name else decay**13


@pytest.mark.parametrize(
    ("given", "image", "text"),
    [
        ("--image-layer-decay 0.8 --text-layer-decay 0.8", 0.8, 0.8),
        ("--image-layer-decay 0.8 --text-layer-decay 0.9", 0.8, 0.9),
        ("--visual-layer-decay 0.8", 0.8, 1.0),
        ("--text-layer-decay 0.8 --image-layer-decay 1.0", 1.0, 0.8),
    ],
)
def test_layers_have_the_rates_of_openclip(given, image, text, capsys):
    recipe, said = imported(capsys, f"main.py {VIT} {given}", "--world-size", "1")
    names = state_shapes(load_architecture("ViT-B-32"))
    optim = check_config(recipe, "recipe").optim
    assert lr_factors(optim, names) == pytest.approx(
        {name: rates_in_openclip(name, image, text) for name in names}
    )
    assert "CHECK" not in said
    positions = {"positional_embedding", "visual.positional_embedding"}
    assert positions <= without_decay(optim, names)


def test_a_gradient_that_is_not_the_batchs_is_said(capsys):
    start = f"torchrun --nproc_per_node 4 -m main {VIT} --local-loss"
    _, text = imported(capsys, start)
    assert "# --gather-with-grad: without it, --local-loss gives a gradient of another" in text
    _, text = imported(capsys, f"{start.removesuffix(' --local-loss')} --grad-clip-norm 1.0")
    assert "# --gather-with-grad: CHECK: without it, the gradient of the towers is 1/4 of" in text
    assert "so that --grad-clip-norm clips more" in text
    for exact in ("--gather-with-grad", "--siglip"):
        assert "without it" not in imported(capsys, f"{start} {exact}")[1]
    _, text = imported(capsys, f"main.py {VIT} --accum-freq 4")
    assert "logit_scale and logit_bias are 4 times too large" in text


def test_a_pretrained_image_tower_starts_pretrained(capsys):
    line = "main.py --model convnext_base --train-data x.tar --train-num-samples 100000"
    recipe, text = imported(capsys, f"{line} --pretrained-image")
    assert recipe["model"]["init_image_from"] == "convnext_base-start.pt"
    assert "create_model('convnext_base', pretrained_image=True).state_dict(), 'conv" in text
    recipe, text = imported(
        capsys, f"{line.replace('convnext_base', 'roberta-ViT-B-32')} --pretrained-image"
    )
    assert recipe["model"]["init_from"] == "roberta-ViT-B-32-start.pt"
    assert "the text and the image tower" in text and "pretrained_image=True" in text


def test_the_validation_loss_is_over_openclips_batches(capsys):
    recipe, _ = imported(capsys, f"main.py {VIT} --val-data v.tar --batch-size 96")
    assert recipe["evaluate"]["batch_size"] == 96


def test_a_tracker_that_is_unknown_leaves_another(capsys):
    for given, log in (
        ("trackio", {"wandb": False, "tensorboard": True}),
        ("wandb,trackio", {"wandb": True, "tensorboard": False}),
    ):
        recipe, text = imported(capsys, f"main.py {VIT} --report-to {given}")
        assert recipe["log"] == log and "CHECK: trackio is not supported" in text


def test_a_command_that_evaluates_says_what_does_here(capsys):
    recipe, text = imported(capsys, LINES["README.md, Evaluating hosted pretrained checkpoint"])
    weights = "open_clip:ViT-B-32-quickgelu/laion400m_e32"
    assert recipe["model"] == {"name": "ViT-B-32-quickgelu", "init_from": weights}
    assert f"The same here: clip-train evaluate THIS.yaml --weights {weights}\n" in text


def test_a_variable_of_a_script_is_named(capsys):
    _, text = imported(capsys, f"main.py {VIT} --val-data ${{VAL:-v.tar}} --lr 1e-4 2>&1 | tee log")
    assert (
        "# --val-data: CHECK: ${VAL:-v.tar} is a variable of a script: replace it by its value\n"
        in text
    )
    assert imported(capsys, "main.py --precision amp")[1].count("# --precision amp: ") == 1


def test_captions_shards_and_sharding_of_the_main_branch(capsys):
    recipe, text = imported(
        capsys, f"main.py {VIT} --json-text-key 'long;short' --json-text-key-probs 0.7 0.3 --fsdp"
    )
    assert recipe["data"]["caption_key"] == {"json.long": 0.7, "json.short": 0.3}
    assert recipe["engine"] == {"precision": "bf16", "kind": "fsdp", "zero_stage": 3}
    assert imported(capsys, f"main.py {VIT} --text-key 'txt;caption'")[0]["data"][
        "caption_key"
    ] == ["txt", "caption"]
    recipe, text = imported(
        capsys, f"main.py {VIT} --wd-exclude '*.bias' '*pos*' --report-to wandb"
    )
    # its main branch never lets positions decay
    positions = ["positional_embedding", "visual.positional_embedding"]
    assert recipe["optim"]["no_decay"] == [*positions, "*.bias", "*pos*"]
    assert recipe["log"]["wandb"] is True


def test_a_caption_of_weight_0_is_read_if_the_others_are_missing(capsys):
    line = f"main.py {VIT} --json-text-key 'a;b;c;d' --json-text-key-probs"
    recipe, _ = imported(capsys, f"{line} 0.7 0 0.3")
    weights = recipe["data"]["caption_key"]
    assert weights == {"json.a": 0.7, "json.c": 0.3, "json.b": 1e-9, "json.d": pytest.approx(1e-18)}
    assert main(["import-args", f"{line} 1 1 1 1 1"]) == 2
    assert "more numbers than --json-text-key has names (4)" in capsys.readouterr().err
    recipe, text = imported(capsys, f"main.py {VIT} --json-text-key-probs 1")
    assert "caption_key" not in recipe["data"]
    assert "# --json-text-key-probs: does nothing there without --json-text-key" in text


def augmentation(capsys, *settings: str) -> tuple[dict, str]:
    quoted = " ".join(f"'{each}'" for each in settings)
    recipe, text = imported(capsys, f"python -m open_clip_train.main {VIT} --aug-cfg {quoted}")
    return {key: value for key, value in recipe["data"].items() if key.startswith("aug_")}, text


def test_augmentation_is_what_openclip_does(capsys):
    """Its transform.py: without use_timm jitter needs a probability, and a ratio is passed over."""
    keys, text = augmentation(
        capsys, "scale=(0.4, 1.0)", "color_jitter=(0.32, 0.32, 0.32, 0.08)", "color_jitter_prob=0.8",
        "gray_scale_prob=0.2", "ratio=(0.5, 2.0)",
    )  # fmt: skip
    assert keys == {
        "aug_scale": [0.4, 1.0], "aug_color_jitter": [0.32, 0.32, 0.32, 0.08], "aug_color_jitter_prob": 0.8,
        "aug_gray_scale_prob": 0.2,
    }  # fmt: skip
    assert (
        "# --aug-cfg ratio: does nothing there without use_timm; data.aug_ratio would here" in text
    )
    keys, text = augmentation(capsys, "color_jitter=0.4")
    assert keys == {}
    assert (
        "# --aug-cfg color_jitter: does nothing there without color_jitter_prob; data.aug" in text
    )
    # timm's way to switch it off
    assert augmentation(capsys, "use_timm=True", "color_jitter=None", "re_prob=None")[0] == {}
    keys, text = augmentation(
        capsys,
        "use_timm=True",
        "ratio=(0.5, 2)",
        "color_jitter=0.4",
        "gray_scale_prob=0.2",
        "re_prob=0.1",
    )
    assert keys == {"aug_ratio": [0.5, 2], "aug_color_jitter": [0.4, 0.4, 0.4, 0.0]}
    assert (
        "# --aug-cfg re_prob: CHECK: has no counterpart" in text
        and "# --aug-cfg gray_scale_prob: does nothing" in text
    )


def test_synthetic_data_need_no_shards(capsys):
    recipe, text = imported(
        capsys, "main.py --dataset-type synthetic --model ViT-B-32 --train-num-samples 1000000"
    )
    assert (
        recipe["data"] == {"num_samples": 1_000_000, "workers": 4, "kind": "synthetic"}
        and "REPLACE" not in text
    )
    assert (
        imported(capsys, "main.py --dataset-type synthetic --model ViT-B-32")[0]["data"][
            "num_samples"
        ]
        == 1_000_000
    )


def test_a_pretrained_text_tower_starts_pretrained(capsys):
    line = (
        "main.py --model roberta-ViT-B-32 --train-data x.tar --train-num-samples 100000 --lock-text"
    )
    assert main(["import-args", line]) == 0
    out, err = capsys.readouterr()
    model = yaml.safe_load(out)["model"]
    assert model["init_from"] == "roberta-ViT-B-32-start.pt" and "lock_text" not in model
    made = "open_clip.create_model('roberta-ViT-B-32').state_dict(), 'roberta-ViT-B-32-start.pt')"
    assert made in out and "warning: --model: OpenCLIP starts the text tower" in err
    assert "warning: --lock-text: " in err and "model.freeze" in err
    other = imported(capsys, f"{line} --pretrained laion2b_s12b_b32k")
    assert other[0]["model"]["init_from"].endswith("/laion2b_s12b_b32k") and made not in other[1]


def test_a_model_of_ones_own(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "main.py --model {} --train-data x.tar --train-num-samples 100000"
    recipe, text = imported(capsys, line.format("my-vit"))
    assert recipe["model"]["name"] == "open_clip:my-vit"
    Path("my-vit.json").write_text("{}")
    for name in ("my-vit", "my-vit.json", f"{tmp_path}/my-vit.json"):
        recipe, text = imported(capsys, line.format(name))
        assert Path(recipe["model"]["name"]).samefile("my-vit.json") and "--model" not in text
    for name in ("ViT-L/14", "EVA02-B-16", "convnext_base_w", "ViT-B-16-SigLIP2-256"):
        assert "--model" not in imported(capsys, line.format(name))[1]


def test_a_json_of_ones_own_is_treated_as_a_named_model(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "main.py --train-data x.tar --train-num-samples 100000 --model my.json"
    for quick, said in (({}, True), ({"quick_gelu": True}, False)):
        Path("my.json").write_text(json.dumps(quick))
        assert main(["import-args", f"{line} --force-quick-gelu"]) == 0
        assert (
            'warning: --force-quick-gelu: put "quick_gelu": true' in capsys.readouterr().err
        ) is said
    Path("my.json").write_text(json.dumps({"text_cfg": {"hf_model_name": "roberta-base"}}))
    assert main(["import-args", f"{line} --lock-text"]) == 0
    out, err = capsys.readouterr()
    model = yaml.safe_load(out)["model"]
    assert model == {"name": "open_clip:my.json", "init_from": "my-start.pt"}
    assert "open_clip.add_model_config('my.json'); torch.save(open_clip.create_model('my')" in out
    assert "warning: --lock-text: " in err


@pytest.mark.parametrize("logs", [".", "./", "..", "/", "logs/.", "./logs/", "/scratch/logs"])
def test_a_run_is_beside_openclips_logs(logs, capsys, tmp_path, monkeypatch):
    (tmp_path / "open_clip").mkdir()
    monkeypatch.chdir(tmp_path / "open_clip")
    recipe, _ = imported(capsys, f"main.py {VIT} --logs {logs} --name a")
    theirs, ours = Path(logs).resolve(), Path(recipe["run"]["dir"]).resolve()
    assert ours == theirs.parent / f"{theirs.name}-clip-train" / "a"


def test_an_optimizer_by_timms_name(capsys, tmp_path):
    recipe, text = imported(capsys, f"torchrun --nproc_per_node 2 -m main {VIT} --opt timm/muon")
    assert recipe["optim"]["name"] == "muon" and "kind" not in recipe["engine"]
    (tmp_path / "r.yaml").write_text(text)
    assert main(["plan", str(tmp_path / "r.yaml"), "--world-size", "2", "--json"]) == 0
    capsys.readouterr()
    assert main(["import-args", f"main.py {VIT} --opt timm/adafactor"]) == 2
    assert (
        "optim.name ('adafactor') must be adamw, sgd, muon or the import path of a class"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "line, said",
    [
        (
            "main.py --batch-sise 3",
            "--batch-sise is not a flag of OpenCLIP; did you mean --batch-size?",
        ),
        (
            "main.py --use-flair-loss --zq 3 x --lr 1 --batch-sise 3",
            "--batch-sise is not a flag of OpenCLIP; did",
        ),
        (
            "main.py --use-flair-loss --zq 3 x --lr 1 --batch-sise 3",
            "--zq is not a flag of OpenCLIP; leave it out",
        ),
        ("main.py --train-data 'a.tar", "quote it as one argument"),
        ("main.py --batch-size", "--batch-size has no value"),
        ("main.py a.tar", "'a.tar' is not a flag of OpenCLIP"),
        ("none.sh", "give the command itself, not a file"),
        ("main.py --batch-size $BS", "--batch-size ($BS) must be an integer; put the number in"),
        ("main.py --epochs ten", "--epochs (ten) must be an integer"),
        ("main.py", "no flag of OpenCLIP behind main.py"),
        ("main.py --siglip=1", "--siglip takes no value"),
        (
            "main.py --precision fp8",
            "--precision (fp8) is not a value of OpenCLIP; give one of amp,",
        ),
        (
            "main.py --aug-cfg use_timm=True color_jitter=abc",
            "--aug-cfg color_jitter=abc must be a number, or 3 or 4 of them",
        ),
        ("main.py --warmup ten", "--warmup (ten) must be an integer"),
        (
            "main.py --lr-scheduler linear",
            "schedule.name ('linear') must be cosine, constant, constant-with-cooldown",
        ),
        ("main.py --train-data 'pipe:cat x'", "no path or URL of shards in this command"),
        ("main.py --force-image-size 256 192", "--force-image-size 256 192: images are square"),
        ("main.py --dataset-type webdataset-audio", "only images and texts can be trained on"),
        ("main.py --aug-cfg use_timm=True naflex=True", "--aug-cfg naflex: images of native"),
        ("main.py --model ViT-B-16-SigLIP2-naflex", "cannot be trained here: images of native"),
        ("main.py --model coca_ViT-B-32 --siglip", "takes no bias; remove --siglip"),
        ("main.py --text-layer-decay $D", "--text-layer-decay ($D) must be a number"),
        ("main.py --lr-scheduler const-cooldown", "const-cooldown needs --epochs-cooldown"),
        (
            "main.py --model hf-hub:org/name",
            "give --model the architecture's name, and --pretrained hf-hub:org/name",
        ),
    ],
)
def test_mistakes(line, said, capsys):
    assert main(["import-args", line]) == 2
    assert said in capsys.readouterr().err


def test_without_quotes_it_says_to_quote(capsys):
    with pytest.raises(SystemExit):
        main(
            [
                "import-args",
                "torchrun",
                "--nproc_per_node",
                "8",
                "-m",
                "open_clip_train.main",
                "--model",
                "ViT-B-32",
            ]
        )
    assert "quote the command as one argument" in capsys.readouterr().err


def test_a_flag_of_openclip_where_a_key_belongs(capsys):
    line = [
        "train",
        "my.yaml",
        "--lr",
        "1e-3",
        "--batch-size=512",
        "--warmup",
        "100",
        "--grad-checkpointing",
        "--resume",
    ]
    with pytest.raises(SystemExit):
        main(line)
    said = capsys.readouterr().err
    for text in ("--lr: optim.lr\n", "--warmup: schedule.warmup_steps\n", "batch.global_size",
                 "--grad-checkpointing: engine.activation_checkpointing\n", "resumes automatically"):  # fmt: skip
        assert text in said, text
    with pytest.raises(SystemExit):
        main(["train", "my.yaml", "--learningrate", "1e-3"])
    assert "OpenCLIP" not in capsys.readouterr().err
