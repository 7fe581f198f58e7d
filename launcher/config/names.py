"""Names that users of other trainers write, and the key of a recipe that each stands for."""

from __future__ import annotations

# OpenCLIP's flag -> key, where the value is the same.
SAME = {
    "train-data": "data.train",
    "val-data": "data.val",
    "train-num-samples": "data.num_samples",
    "workers": "data.workers",
    "epochs": "run.epochs",
    "seed": "run.seed",
    "lr": "optim.lr",
    "beta1": "optim.beta1",
    "beta2": "optim.beta2",
    "eps": "optim.eps",
    "wd": "optim.weight_decay",
    "momentum": "optim.momentum",
    "warmup": "schedule.warmup_steps",
    "lr-cooldown-end": "schedule.final_lr",
    "lr-cooldown-power": "schedule.cooldown_power",
    "force-patch-dropout": "model.patch_dropout",
    "wandb-project-name": "log.wandb_project",
    "grad-checkpointing": "engine.activation_checkpointing",
    "torchcompile": "engine.compile",
    "dataset-resampled": "data.resampled",
    "imagenet-val": "evaluate.zero_shot_data",
    "lock-image": "model.lock_image",
    "lock-image-freeze-bn-stats": "model.lock_image_freeze_bn_stats",
    "lock-image-unlocked-groups": "model.lock_image_unlocked_groups",
    "lock-text": "model.lock_text",
    "lock-text-unlocked-layers": "model.lock_text_unlocked_layers",
    "grad-clip-norm": "optim.grad_clip_norm",
    "wd-exclude": "optim.no_decay",
}
# What users of OpenCLIP and of Hugging Face write.
OTHER_NAMES = {flag.replace("-", "_"): key for flag, key in SAME.items()} | {
    "learning_rate": "optim.lr",
    "batch_size": "batch.global_size",
    "global_batch_size": "batch.global_size",
    "micro_batch_size": "batch.micro_size",
    "accum_freq": "batch.micro_size",
    "gradient_accumulation_steps": "batch.micro_size",
    "grad_clip": "optim.grad_clip_norm",
    "max_grad_norm": "optim.grad_clip_norm",
    "dataset_type": "data.kind",
    "captions": "data.caption_key",
    "augment": "data.aug_scale",
    "color_jitter": "data.aug_color_jitter",
    "pretrained": "model.init_from",
    "save_frequency": "checkpoint.every_steps",
    "val_frequency": "evaluate.every_steps",
    "num_workers": "data.workers",
}
