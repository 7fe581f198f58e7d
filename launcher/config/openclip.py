"""OpenCLIP 3.3.0's flags (`open_clip_train/params.py`): the keys that stand for them here, or why none does."""

from __future__ import annotations

SWITCHES = frozenset({
    "dataset-resampled", "log-local", "use-bn-sync", "skip-scheduler", "save-most-recent", "pretrained-image",
    "lock-image", "lock-image-freeze-bn-stats", "grad-checkpointing", "local-loss", "gather-with-grad",
    "force-quick-gelu", "force-custom-text", "torchscript", "torchcompile", "trace", "debug", "copy-codebase",
    "horovod", "ddp-static-graph", "no-set-device-rank", "lock-text", "lock-text-freeze-layer-norm",
    "delete-previous-checkpoint", "siglip",
})  # fmt: skip
LISTS = frozenset({"image-mean", "image-std", "force-image-size", "aug-cfg"})
# Flag -> key, where the value is the same.
SAME = {
    "train-data": "data.train", "val-data": "data.val", "train-num-samples": "data.num_samples",
    "workers": "data.workers", "epochs": "run.epochs", "seed": "run.seed", "lr": "optim.lr", "beta1": "optim.beta1",
    "beta2": "optim.beta2", "eps": "optim.eps", "wd": "optim.weight_decay", "momentum": "optim.momentum",
    "warmup": "schedule.warmup_steps", "lr-cooldown-end": "schedule.final_lr",
    "lr-cooldown-power": "schedule.cooldown_power", "force-patch-dropout": "model.patch_dropout",
    "distill-model": "model.teacher_name", "distill-pretrained": "model.teacher",
    "wandb-project-name": "log.wandb_project", "remote-sync": "checkpoint.remote",
    "grad-checkpointing": "engine.activation_checkpointing", "torchcompile": "engine.compile",
    "dataset-resampled": "data.resampled", "train-data-upsampling-factors": "data.train_weights",
    "imagenet-val": "evaluate.zero_shot_data",
}  # fmt: skip
# Flag -> why the recipe has nothing of it.
NOTES = {
    "local-loss": "always so: each rank computes the rows of its own samples",
    "gather-with-grad": "always so: the gradient is that of the global batch on one device",
    "val-num-samples": "counted",
    "dataset-type": "data.kind: shards, of a CSV or a folder `clip-train shards` makes them; or synthetic",
    "csv-separator": "shards hold the captions", "csv-img-key": "shards hold the images",
    "csv-caption-key": "shards hold the captions",
    "imagenet-v2": "clip-train evaluate RECIPE evaluate.zero_shot_data=DIR scores another set",
    "zeroshot-frequency": "zero-shot runs with each evaluation: evaluate.every_steps",
    "cache-dir": "export HF_HOME=DIR", "log-local": "rank 0 logs, and any rank that fails",
    "use-bn-sync": "batch statistics are over all ranks",
    "save-most-recent": "always so: checkpoint.keep_last", "resume": "a run resumes by itself from its newest "
    "checkpoint; OpenCLIP's epoch_K.pt gives its weights as model.init_from",
    "pretrained-image": "give the tower's weights as model.init_from", "image-mean": "of the model's JSON",
    "image-std": "of the model's JSON", "image-interpolation": "bicubic, antialiased",
    "image-resize-mode": "shortest side, then the centre", "force-context-length": "of the model's JSON",
    "force-custom-text": "one layout of weights for all models",
    "torchscript": "engine.compile compiles", "trace": "for inference", "device": "GPUs where there are any",
    "dist-url": "of the launcher", "dist-backend": "nccl on GPUs, gloo on CPUs", "wandb-notes": "write them there",
    "debug": "clip-train doctor looks for what is wrong", "copy-codebase": "clip-train submit freezes the code",
    "horovod": "torchrun, srun or mpirun", "ddp-static-graph": "engine.kind", "no-set-device-rank": "seen by itself",
    "coca-caption-loss-weight": "CoCa's captioner is not trained", "coca-contrastive-loss-weight": "the only loss",
    "remote-sync-frequency": "each checkpoint is uploaded as it is saved", "remote-sync-protocol": "of the URL",
    "use-bnb-linear": "engine.linear=int8 is its like, by torchao", "log-every-n-steps": "every step is recorded",
    "lock-text-freeze-layer-norm": "a locked tower is locked whole",
}  # fmt: skip
# Translated below, with others.
OWN = frozenset({
    "batch-size", "accum-freq", "name", "logs", "precision", "model", "pretrained", "opt", "skip-scheduler",
    "lr-scheduler", "epochs-cooldown", "save-frequency", "val-frequency", "grad-clip-norm",
    "delete-previous-checkpoint", "siglip", "loss-dist-impl", "report-to", "aug-cfg", "lock-image",
    "lock-image-unlocked-groups", "lock-image-freeze-bn-stats", "lock-text", "lock-text-unlocked-layers",
    "force-quick-gelu", "force-image-size",
})  # fmt: skip
DEFAULTS = {
    "batch-size": 64, "accum-freq": 1, "epochs": 32, "warmup": 10000, "wd": 0.2, "model": "RN50", "workers": 4,
    "precision": "amp", "save-frequency": 1, "val-frequency": 1, "lr-scheduler": "cosine", "seed": 0,
}  # fmt: skip
"""Of OpenCLIP, where ours differ or a recipe needs them."""
FLAGS = SWITCHES | LISTS | SAME.keys() | NOTES.keys() | OWN
