"""`clip-train import-args`: command lines of OpenCLIP's documents become recipes that `plan` takes."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import main
from launcher.config.openclip import FLAGS
from launcher.config.recipe import check_config

CC12M = (
    "--train-data '/data/cc12m/cc12m-train-{0000..2175}.tar' --train-num-samples 10968539 --dataset-type webdataset "
    "--batch-size 320 --precision amp --workers 4 --imagenet-val /data/imagenet/validation/"
)
STABILITY = """\
#!/bin/bash
#SBATCH --nodes 30
#SBATCH --ntasks-per-node=8
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
EXP_NAME="test-B-32-laion5b-lr1e-3-bs90k"
srun --comment laion --cpu_bind=v --accel-bind=gn python -m training.main \\
    --save-frequency 1 \\
    --train-data="pipe:aws s3 cp s3://laion5b/{laion2B-data/{000000..231349}.tar,other/{000000..226687}.tar} -" \\
    --train-num-samples 135646078 --dataset-type webdataset --dataset-resampled --warmup 2000 --batch-size=375 \\
    --epochs=97 --lr 1e-3 --workers=8 --report-to wandb --name ${EXP_NAME} --logs /scratch/logs/ --model ViT-B-32 \\
    --seed 0 --ddp-static-graph --local-loss --gather-with-grad --grad-checkpointing --precision amp_bfloat16 \\
    --wandb-project-name open_clip6 --resume "latest" --remote-sync s3://s-laion/mitchellw/logs
echo done
"""
VIT = "--model ViT-B-32 --train-data x.tar --train-num-samples 3000000"
COMMANDS = {  # of OpenCLIP's README, docs and scripts
    "one process": "python -m training.main --save-frequency 1 --zeroshot-frequency 1 --report-to tensorboard "
    '--train-data="/path/to/train_data.csv" --val-data="/path/to/validation_data.csv" --csv-img-key filepath '
    "--csv-caption-key title --imagenet-val=/path/to/imagenet/root/val/ --warmup 10000 --batch-size=128 --lr=1e-3 "
    "--wd=0.1 --epochs=30 --workers=8 --model ViT-B-16 --train-num-samples 3000000",
    "one node": f"torchrun --nproc_per_node 4 -m training.main {CC12M} --model ViT-B-32",
    "nodes": f"torchrun --nproc_per_node=4 --rdzv_endpoint=$HOSTE_NODE_ADDR -m training.main {CC12M} --model ViT-B/32",
    "slurm": "srun --cpu_bind=v --accel-bind=gn python -u src/training/main.py --save-frequency 1 --report-to "
    'tensorboard --train-data="/data/LAION-400M/{00000..41455}.tar" --warmup 2000 --batch-size=256 --epochs=32 '
    '--workers=8 --model ViT-B-32 --name "ViT-B-32-Vanilla" --seed 0 --local-loss --gather-with-grad '
    "--train-num-samples 407332084",
    "stability": STABILITY,
    "yfcc": f"python -m training.main {VIT} --lr 5e-4 --epochs 32 --batch-size 256",
    "accumulation": f"torchrun --nproc_per_node 8 -m open_clip_train.main {VIT} --batch-size 128 --accum-freq 4",
    "siglip": f"torchrun --nproc_per_node 8 -m open_clip_train.main {VIT} --siglip --loss-dist-impl gather --lr 5e-4",
    "two sources": "torchrun --nproc_per_node 8 -m open_clip_train.main --dataset-resampled --train-data "
    "'/data/cc12m/cc12m-train-{0000..2175}.tar::/data/LAION-400M/{00000..41455}.tar' "
    "--train_data_upsampling_factors=1::2 --train-num-samples 10968539 --model ViT-B-32",
    "final phase": f"python -m open_clip_train.main {VIT} --force-patch-dropout 0. --pretrained /ckpt/epoch_31.pt "
    "--lr 1e-5 --warmup 100 --epochs 1",
    "cooldown": f"python -m open_clip_train.main {VIT} --lr-scheduler const-cooldown --epochs-cooldown 4 "
    "--lr-cooldown-end 1e-6 --epochs 32",
    "constant": f"python -m open_clip_train.main {VIT} --skip-scheduler --lr 1e-4",
    "remote": f"python -m training.main {VIT} --remote-sync s3://bucket/runs --delete-previous-checkpoint --name b32",
    "compiled": f"python -m open_clip_train.main {VIT} --torchcompile --precision pure_bf16 --grad-clip-norm 1.0",
    "fp32": f"python -m open_clip_train.main {VIT} --precision fp32 --device cpu --batch-size 8",
    "aug": f"torchrun --nproc_per_node 8 -m open_clip_train.main {VIT} --aug-cfg scale='(0.4, 1.0)' "
    "color_jitter='(0.32, 0.32, 0.32, 0.08)' color_jitter_prob=0.8 gray_scale_prob=0.2 --beta1 0.9 --beta2 0.95",
    "clipa": "torchrun --nproc_per_node 8 -m open_clip_train.main --save-frequency 1 --save-most-recent "
    "--model ViT-L-16 --zeroshot-frequency 1 --train-data '/path/to/laion-400m' --dataset-type webdataset "
    '--lr "2.24e-5" --beta1 0.9 '
    "--beta2 0.95 --warmup 3571 --wd 0.2 --batch-size 896 --epochs 1 --train-num-samples 131072000 --workers 6 "
    "--pretrained '/path/to/ckpt' --precision 'amp_bf16' --ddp-static-graph --local-loss --gather-with-grad "
    "--grad-checkpointing --log-every-n-steps 293 --seed 0 --logs ./logs/ --imagenet-val '/path/to/imagenet/val'",
    "4e8": "torchrun --nproc_per_node 8 -m open_clip_train.main --train-data '/path/to/datacomp1b' "
    "--train-num-samples 4e8 --lr 2.048e-3 --warmup 3200 --batch-size 8192 --epochs 32 --model ViT-H-14",
    "cc3m": 'python -m training.main --train-data="pipe:aws s3 cp s3://s-mas/cc3m/{00000..00329}.tar -" '
    '--train-num-samples 3000000 --val-data="pipe:aws s3 cp s3://s-mas/cc3m/{00330..00331}.tar -" --val-num-samples '
    '10000 --batch-size 256 --warmup 2000 --epochs 10 --lr 5e-4 --model ViT-B-32 --name "10_unfrozen"',
    "coca's shell": 'export PYTHONPATH="$PYTHONPATH:$PWD/src"; python src/training/main.py --train-data '
    '"/home/x/{00000..01243}.tar" --train-num-samples 10968539 --zeroshot-frequency=1 --warmup 2000 --batch-size=128 '
    "--wd=0.1 --epochs=4 --workers=8 --model=ViT-L-14",
}


def imported(capsys, *line: str) -> tuple[dict, str]:
    assert main(["import-args", *line]) == 0
    text = capsys.readouterr().out
    return yaml.safe_load(text), text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_documents_command_becomes_a_recipe_that_plan_takes(name, capsys, tmp_path):
    _, text = imported(capsys, COMMANDS[name])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    check_config(yaml.safe_load(text), name)
    if name in ("stability", "two sources"):  # the others differ in sizes alone, and each takes seconds
        assert main(["plan", str(recipe), "--world-size", "8", "--json"]) == 0


def test_a_batch_is_that_of_all_gpus_and_micro_batches(capsys):
    recipe, text = imported(capsys, COMMANDS["accumulation"])
    assert recipe["batch"] == {"global_size": 8 * 128 * 4, "micro_size": 128}
    recipe, _ = imported(capsys, STABILITY)
    assert recipe["batch"]["global_size"] == 240 * 375
    recipe, text = imported(capsys, COMMANDS["slurm"])
    assert recipe["batch"]["global_size"] == 256 and "say --world-size N" in text
    assert imported(capsys, COMMANDS["slurm"], "--world-size", "128")[0]["batch"]["global_size"] == 32768


def test_what_differs_is_said(capsys):
    recipe, text = imported(capsys, STABILITY)
    assert recipe["data"]["train"] == ("s3://laion5b/{laion2B-data/{000000..231349}.tar,other/{000000..226687}.tar}")
    assert recipe["checkpoint"]["remote"].startswith("s3://s-laion/mitchellw/logs/")
    assert recipe["optim"]["grad_clip_norm"] is None and recipe["optim"]["lr"] == 1e-3
    assert recipe["checkpoint"]["every_steps"] == math.ceil(135646078 / 90000)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    for flag in ("--local-loss", "--gather-with-grad", "--resume", "--ddp-static-graph", "--train-data"):
        assert any(line.startswith(f"# {flag}: ") for line in comments), flag
    assert any("empty captions" in line for line in comments)
    recipe, _ = imported(capsys, COMMANDS["siglip"])
    assert recipe["loss"] == {"kind": "sigmoid", "exchange": "gather"}
    assert recipe["model"] == {"name": "ViT-B-32", "init_logit_bias": -10.0, "init_logit_scale": math.log(10)}
    assert imported(capsys, COMMANDS["two sources"])[0]["data"]["train_weights"] == [1, 2]
    found = imported(capsys, COMMANDS["one node"])[0]["evaluate"]
    assert found == {
        "zero_shot_data": "/data/imagenet/validation/", "zero_shot_classes": "imagenet", "every_steps": 8570
    }  # fmt: skip
    assert imported(capsys, COMMANDS["4e8"])[0]["data"]["num_samples"] == 400_000_000


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
    assert "# --aug-cfg ratio: does nothing there without use_timm; data.aug_ratio would here" in text
    assert augmentation(capsys, "color_jitter=0.4")[0] == {}
    keys, text = augmentation(
        capsys, "use_timm=True", "ratio=(0.5, 2)", "color_jitter=0.4", "gray_scale_prob=0.2", "re_prob=0.1"
    )
    assert keys == {"aug_ratio": [0.5, 2], "aug_color_jitter": [0.4, 0.4, 0.4, 0.0]}
    assert "# --aug-cfg re_prob: has no counterpart" in text and "# --aug-cfg gray_scale_prob: does nothing" in text


def test_synthetic_data_need_no_shards(capsys):
    recipe, text = imported(capsys, "main.py --dataset-type synthetic --model ViT-B-32 --train-num-samples 1000000")
    assert recipe["data"] == {"num_samples": 1_000_000, "workers": 4, "kind": "synthetic"} and "REPLACE" not in text


def test_a_params_txt_and_a_pipe(capsys, tmp_path, monkeypatch):
    lines = {"accum_freq": 2, "batch_size": 64, "beta1": 0.9, "beta2": 0.98, "eps": 1e-06, "epochs": 3, "lr": 0.0005,
             "model": "ViT-B-16", "train_data": "/a/{0..9}.tar", "train_num_samples": 10000, "warmup": 10,
             "world_size": 4, "siglip": False, "aug_cfg": {"scale": (0.4, 1.0)}, "distributed": True,
             "val_data": None}  # fmt: skip
    file = tmp_path / "params.txt"
    file.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    recipe, _ = imported(capsys, str(file))
    assert recipe["batch"]["global_size"] == 512 and recipe["run"]["epochs"] == 3
    assert "kind" not in recipe.get("loss", {}) and "val" not in recipe["data"]
    assert recipe["data"]["aug_scale"] == [0.4, 1.0]
    monkeypatch.setattr("sys.stdin", io.StringIO(COMMANDS["one node"]))
    assert imported(capsys, "-")[0]["batch"]["global_size"] == 4 * 320


@pytest.mark.parametrize(
    "line, said",
    [
        ("main.py --batch-sise 3", "--batch-sise is no flag of OpenCLIP 3.3.0; did you mean --batch-size?"),
        ("main.py --train-data 'a.tar", "quote it as one argument"),
        ("main.py --batch-size", "--batch-size has no value"),
        ("main.py a.tar", "'a.tar' is no flag of OpenCLIP"),
        ("none.sh", "cannot read none.sh"),
    ],
)
def test_mistakes(line, said, capsys):
    assert main(["import-args", line]) == 2
    assert said in capsys.readouterr().err


def test_the_page_has_every_flag():
    page = (Path(__file__).resolve().parents[2] / "docs" / "from_openclip.md").read_text()
    assert {line.split("`")[1].removeprefix("--") for line in page.splitlines() if line.startswith("| `--")} == FLAGS
