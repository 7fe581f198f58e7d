"""OpenCLIP's flags: the corresponding keys, or the reason why there is none.

The flags of version 3.3.0 (`open_clip_train/params.py`), additional ones of its main branch of
2026-06-27 (`MAIN_ONLY`; releases 4.x come from it), and a few older ones. docs/from_openclip.md
shows `meaning` for each flag, and so does a verb that is given one.
"""

import math
from collections.abc import Sequence
from typing import Any

from clip_train.recipe.names import SAME

SWITCHES = frozenset(
    {
        "dataset-resampled",
        "log-local",
        "use-bn-sync",
        "skip-scheduler",
        "save-most-recent",
        "pretrained-image",
        "lock-image",
        "lock-image-freeze-bn-stats",
        "grad-checkpointing",
        "local-loss",
        "gather-with-grad",
        "force-quick-gelu",
        "force-custom-text",
        "torchscript",
        "torchcompile",
        "trace",
        "debug",
        "copy-codebase",
        "horovod",
        "ddp-static-graph",
        "no-set-device-rank",
        "lock-text",
        "lock-text-freeze-layer-norm",
        "delete-previous-checkpoint",
        "siglip",
        "audio-fusion",
        "audio-int16-normalize",
        "text-pooler-own-group",
        "fsdp",
        "fsdp-no-reshard-after-forward",
        "fsdp-offload-cpu",
        "use-naflex",
        "force-naflex-vision",
        "length-bucketing",
        "square-resize-only",
        "force-mrl-loss",
    }
)
LISTS = frozenset(
    {
        "image-mean",
        "image-std",
        "force-image-size",
        "aug-cfg",
        "opt-kwargs",
        "opt-fallback-list",
        "wd-exclude",
        "json-text-key-probs",
        "naflex-patch-sizes",
        "naflex-patch-size-probs",
        "naflex-seq-lens",
        "naflex-seq-len-probs",
    }
)
# Flag -> its keys, if a single key does not describe it.
OWN = {
    "accum-freq": "`batch.global_size`; `batch.kept_graphs=all` needs no second forward",
    "aug-cfg": "`data.aug_scale`, `data.aug_ratio`, `data.aug_color_jitter`, "
    "`data.aug_color_jitter_prob`, "
    "`data.aug_gray_scale_prob`; the same keys with `use_timm`; also `data.aug_erase_prob`",
    "batch-size": "`batch.micro_size`; times ranks and `--accum-freq` it is `batch.global_size`",
    "dataset-type": "`data.kind`: `shards` (`clip-train shards` converts a CSV), or `synthetic`",
    "delete-previous-checkpoint": "`checkpoint.keep_last=1`",
    "epochs-cooldown": "`schedule.cooldown_steps`",
    "force-image-size": "`model.image_size`",
    "force-quick-gelu": "`model.name`: the preset ending in `-quickgelu`; a JSON of your own needs "
    "`quick_gelu: true`",
    "fsdp": "`engine.kind=fsdp`, `engine.zero_stage=3`",
    "fsdp-no-reshard-after-forward": "`engine.zero_stage=2`",
    "fsdp-offload-cpu": "`engine.offload=optimizer`: master weights and moments",
    "text-key": "`data.caption_key`",
    "json-text-key": "`data.caption_key`, each name with the prefix `json.`",
    "json-text-key-probs": "`data.caption_key`: names with weights; a name without one, which is read "
    "only if the sample lacks the others, gets 1e-9",
    "image-layer-decay": "`optim.layer_decay` if both towers have one value, and "
    "`optim.lr_multipliers`",
    "text-layer-decay": "as `--image-layer-decay`",
    "visual-layer-decay": "as `--image-layer-decay`",
    "logs": "`run.dir`, in a separate folder: `DIR-clip-train/NAME`",
    "loss-dist-impl": "`loss.exchange`: `gather` for `gather`, `ring` for the others",
    "lr-scheduler": "`schedule.name`",
    "model": "`model.name`; `open_clip:NAME` for towers that OpenCLIP builds",
    "name": "`run.name`",
    "opt": "`optim.name`",
    "precision": "`engine.precision`: `amp`, which is fp16 there, becomes bf16; `fp32` and `fp16` stay",
    "pretrained": "`model.init_from`",
    "pretrained-image": "`model.init_image_from`: a file with the tower's weights",
    "distill-model": "`model.teacher_name`",
    "distill-pretrained": "`model.teacher`",
    "report-to": "`log.wandb`, `log.tensorboard`",
    "remote-sync": "`checkpoint.remote`, under a separate prefix: `URL-clip-train/NAME`",
    "save-frequency": "`checkpoint.every_steps` and `checkpoint.keep_every`, in steps; "
    "also `checkpoint.every_minutes=60`",
    "siglip": "`loss.kind=sigmoid`, `model.init_logit_bias=-10`, `model.init_logit_scale=2.3026`",
    "skip-scheduler": "`schedule.name=constant` without warm-up",
    "train-data-upsampling-factors": (
        "`data.train_weights`: each factor times its source's number of shards"
    ),
    "val-frequency": "`evaluate.every_steps`, in steps",
    "zeroshot-frequency": "`evaluate.every_steps`, in steps: the more frequent of the two",
}
# Flag -> the reason why a recipe does not have it.
NOTES = {
    "local-loss": "always on: each rank computes the rows of its own samples",
    "gather-with-grad": "always on: the gradient equals that of the global batch on one device",
    "val-num-samples": "samples are counted automatically",
    "csv-separator": "`clip-train shards` detects tab or comma",
    "csv-img-key": "`clip-train shards --image-key`",
    "csv-caption-key": "`clip-train shards --caption-key`",
    "imagenet-v2": "`evaluate.sets.v2.data=DIR evaluate.sets.v2.classes=imagenet`, beside `--imagenet-val`",
    "cache-dir": "`export HF_HOME=DIR`",
    "log-local": "rank 0 logs, and so does a rank that fails",
    "use-bn-sync": "always on: batch statistics are over all ranks",
    "save-most-recent": "always on: `checkpoint.keep_last`",
    "resume": "a run resumes automatically from its newest "
    "checkpoint; OpenCLIP's epoch_K.pt can be `model.init_from` (weights only)",
    "image-mean": "set `image_mean` in a JSON of the model",
    "image-std": "set `image_std` in a JSON of the model",
    "image-interpolation": "bicubic with antialiasing; in evaluation as the weights were trained",
    "force-custom-text": "not needed: all models have one layout of weights",
    "torchscript": "not for training; `engine.compile` compiles",
    "trace": "not for training; `engine.compile` compiles",
    "device": "GPUs if there are any, otherwise the CPU",
    "dist-url": "set by the launcher",
    "dist-backend": "always nccl on GPUs and gloo on CPUs",
    "wandb-notes": "write notes in Weights & Biases itself",
    "debug": "`clip-train doctor` finds problems",
    "copy-codebase": "`clip-train submit` freezes the code",
    "horovod": "not supported: use torchrun, srun or mpirun",
    "ddp-static-graph": "only for DDP, which is not an engine here (`engine.kind`)",
    "no-set-device-rank": "detected automatically",
    "remote-sync-frequency": "each checkpoint is uploaded when it is saved",
    "remote-sync-protocol": "the scheme of the URL",
    "use-bnb-linear": "`engine.linear=int8`, with torchao",
    "log-every-n-steps": "every step is recorded",
    "lock-text-freeze-layer-norm": "a locked tower is locked completely",
}
_AUDIO = "does nothing for images; `data.inputs` can train audio and text (docs/extending.md)"
_SQUARES = "refused: its batches change their size; `data.resize=native` keeps it"
_NAFLEX = "does nothing there without `--use-naflex`, which is refused"
_ORDER = "not translated: the seed alone fixes the order; texts are packed or cut at the longest"
_COMPILED = "`engine.compile` compiles each block with inductor"
# The same for flags that only the main branch has.
NEWER = {
    **dict.fromkeys(
        (
            "audio-ext",
            "audio-fill",
            "audio-fusion",
            "audio-int16-normalize",
            "audio-layer-decay",
            "audio-multiprocessing-context",
            "audio-trunc",
            "audio-zeroshot-audio-key",
            "audio-zeroshot-class-key",
            "audio-zeroshot-dataset",
            "audio-zeroshot-multiprocessing-context",
            "audio-zeroshot-split",
            "audio-zeroshot-target-key",
            "audio-zeroshot-template",
            "audio-zeroshot-workers",
            "pretrained-audio",
        ),
        _AUDIO,
    ),
    **dict.fromkeys(("force-naflex-vision", "use-naflex"), _SQUARES),
    **dict.fromkeys(
        (
            "naflex-batch-divisor",
            "naflex-loss-scale",
            "naflex-max-text-tokens",
            "naflex-max-tokens-per-batch",
            "naflex-num-train-image-tokens",
            "naflex-pad-multiple",
            "naflex-patch-size-probs",
            "naflex-patch-sizes",
            "naflex-seq-len-probs",
            "naflex-seq-lens",
        ),
        _NAFLEX,
    ),
    **dict.fromkeys(
        ("bucket-chunk", "bucket-pool", "bucket-prefetch-pools", "length-bucketing"), _ORDER
    ),
    **dict.fromkeys(
        ("torchcompile-backend", "torchcompile-mode", "torchcompile-strategy"), _COMPILED
    ),
    "fsdp-checkpoint": "each rank always writes its share; any layout and engine resumes from it",
    "image-key": "an image is found by its suffix, .jpg, .jpeg, .png, .webp, ..., and is a sample's "
    "only one",
    "log-metric-every-n-steps": "every step is recorded",
    "max-image-pixels": "images of more than 89 million pixels are invalid",
    "opt-fallback-list": "`optim.name=muon` uses AdamW outside the blocks' matrices",
    "opt-kwargs": "`optim.options`, for an optimizer given by its import path",
    "text-pad-multiple": "texts are packed, or cut at the longest of the micro-batch",
    "text-pooler-own-group": "the pooler belongs to the head's group",
    "train-loss-ema-samples": "`report.html` shows the loss of each step",
    "val-retrieval-chunk-size": "retrieval is computed in pieces that fit into memory",
    "val-retrieval-precision": "retrieval is always computed in fp32",
}
MAIN_ONLY = NEWER.keys() | {
    "fsdp",
    "fsdp-no-reshard-after-forward",
    "fsdp-offload-cpu",
    "image-layer-decay",
    "json-text-key",
    "json-text-key-probs",
    "text-key",
    "text-layer-decay",
    "visual-layer-decay",
    "wd-exclude",
}
"""The flags of its main branch that 3.3.0 does not have."""
# Flags of its older versions and branches: first those that have keys.
OLDER_KEYS = {
    "force-mrl-loss": "`loss.widths`",
    "mrl-dim-to-consider": "`loss.widths`: the widths",
    "mrl-loss-weights": "`loss.widths`: the weight of each width",
}
OLDER = {
    "hf-tokenizer-name": "set in the model's JSON",
    "interpolation": NOTES["image-interpolation"],
    "square-resize-only": "set `data.resize`; auto takes it from the weights",
}
# Switch -> keys that it sets.
SWITCH_KEYS: dict[str, dict[str, Any]] = {
    "fsdp": {"engine.kind": "fsdp", "engine.zero_stage": 3},
    "fsdp-no-reshard-after-forward": {"engine.zero_stage": 2},
    "fsdp-offload-cpu": {"engine.offload": "optimizer"},
    "siglip": {
        "loss.kind": "sigmoid",
        "loss.exchange": "ring",
        "model.init_logit_bias": -10.0,
        "model.init_logit_scale": math.log(10),
    },
    "skip-scheduler": {"schedule.name": "constant", "schedule.warmup_steps": 0},
    "delete-previous-checkpoint": {"checkpoint.keep_last": 1},
    "imagenet-val": {"evaluate.zero_shot_classes": "imagenet"},
}
DEFAULTS = {
    "batch-size": 64,
    "accum-freq": 1,
    "epochs": 32,
    "warmup": 10000,
    "wd": 0.2,
    "model": "RN50",
    "workers": 4,
    "precision": "amp",
    "save-frequency": 1,
    "val-frequency": 1,
    "zeroshot-frequency": 2,
    "lr-scheduler": "cosine",
    "seed": 0,
    "grad-clip-norm": None,
}
"""OpenCLIP's defaults, if ours differ or a recipe needs them."""
REASONS = OLDER | NEWER | NOTES  # flag: the reason why a recipe does not have it
FLAGS = SWITCHES | LISTS | SAME.keys() | OWN.keys() | OLDER_KEYS.keys() | REASONS.keys()
# Flags of REASONS that change what is trained whenever they are given. `command.py` adds those that
# change it with some values, or beside other flags.
CHANGES = frozenset(
    {"hf-tokenizer-name", "max-image-pixels", "opt-fallback-list", "opt-kwargs", "use-bnb-linear"}
)


def meaning(flag: str) -> str:
    """A known flag's key or keys, in Markdown, or why there is none."""
    if flag in SAME:
        return f"`{SAME[flag]}`"
    return (OWN | OLDER_KEYS | REASONS).get(flag, "")


def suggest(unknown: Sequence[str]) -> str:
    """Addition to the error about unknown options: the keys for those that are OpenCLIP's."""
    said = []
    for word in unknown:
        flag = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if word.startswith("--") and flag in FLAGS:
            said.append(f"\n  --{flag}: {meaning(flag)}".replace("`", ""))
    return "\nof OpenCLIP's flags, a recipe has" + "".join(said) if said else ""
