"""What is traced, and its ceilings: reads by the host, kernels, and operators with a large float64 result.

DeepSpeed's own waits: 13 at stage 3, 6 in fp16 about the norm and its overflow.
"""

CASES = {
    "info_nce": (1, 910, 0),
    "info_nce all retained": (1, 820, 0),
    "info_nce at 32k": (1, 1980, 0),
    "dropout, checkpointing": (1, 3180, 0),
    "packed texts": (1, 860, 0),
    "native resolution": (1, 1160, 0),
    "sigmoid": (1, 890, 0),
    "memory bank": (1, 1140, 0),
    "contaccum": (1, 1140, 0),
    "distillation": (1, 1180, 0),
    "plain, fp32, 1 rank": (1, 900, 0),
    "plain, bf16, 1 rank": (1, 900, 0),
    "plain, bf16, 2 ranks": (1, 900, 0),
    "fsdp 3, bf16, 1 rank": (1, 1450, 0),
    "fsdp 3, bf16, 2 ranks": (1, 900, 0),
    "fsdp 0, bf16, 2 ranks": (1, 1060, 0),
    "fsdp 1, bf16, 2 ranks": (1, 930, 0),
    "fsdp 2, fp32, 2 ranks": (1, 830, 0),
    "deepspeed 0, fp32, 2 ranks": (1, 1000, 0),
    "deepspeed 1, bf16, 1 rank": (1, 1140, 0),
    "deepspeed 1, bf16, 2 ranks": (1, 1180, 0),
    "deepspeed 1, fp16, 2 ranks": (8, 1590, 1),
    "deepspeed 2, bf16, 2 ranks": (1, 1130, 0),
    "deepspeed 3, bf16, 2 ranks": (15, 1460, 1),
    "fsdp 2, groups of 2 of 4 ranks": (1, 820, 0),
    "fsdp 3, one GPU for 2 ranks": (1, 900, 0),
    "deepspeed 1, one GPU for 2 ranks": (1, 1180, 0),
    "deepspeed 3, one GPU for 2 ranks": (15, 1460, 1),
    "fsdp 2, int8": (1, 2580, 0),
    "fsdp 2, fp8": (1, 2680, 0),
    "fsdp 2, offload": (63, 900, 0),  # FSDP's own for each gradient on its way to the CPU's memory
    "fsdp 2, compile": (1, 980, 0),  # captured, not fused
    "fsdp 2, moving average": (0, 70, 0),
    "fsdp 2, save": (1, 0, 0),  # for the whole copy
    "fsdp 2, evaluation": (0, 110, 0),
    "prefetch": (0, 3, 0),
    "evaluation": (1, 190, 0),
    "export": (62, 0, 0),  # a read for each tensor
}
# Of stages that launch what others do as well: make test-all.
FULL = (
    "info_nce all retained", "fsdp 0, bf16, 2 ranks", "fsdp 1, bf16, 2 ranks", "fsdp 2, fp32, 2 ranks",
    "deepspeed 0, fp32, 2 ranks", "deepspeed 1, bf16, 1 rank",
    "deepspeed 1, fp16, 2 ranks", "deepspeed 2, bf16, 2 ranks",
    "fsdp 2, groups of 2 of 4 ranks", "deepspeed 1, one GPU for 2 ranks", "fsdp 2, int8", "fsdp 2, fp8",
    "fsdp 2, offload",
)  # fmt: skip
PLANTED = (
    "planted: a mixture of devices", "planted: a read", "planted: the host's by NCCL",
)  # fmt: skip
