"""The properties of GPUs, for the planner and for the share of the peak."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Values from its datasheet."""

    memory: float  # bytes
    flops: float  # a second, dense bf16, or fp16
    link: float  # bytes a second to the others of its node, one way: NVLink, or PCIe
    bf16: bool = True


GPUS = {
    "B200": GPU(180e9, 2250e12, 900e9),
    "H200": GPU(141e9, 989.5e12, 450e9),
    "H100": GPU(80e9, 989.5e12, 450e9),
    "A100-80": GPU(80e9, 312e12, 300e9),
    "A100-40": GPU(40e9, 312e12, 300e9),
    "L40S": GPU(48e9, 362e12, 32e9),
    "A10": GPU(24e9, 125e12, 32e9),
    "4090": GPU(24e9, 165e12, 32e9),
    "V100": GPU(32e9, 125e12, 150e9, bf16=False),
}
