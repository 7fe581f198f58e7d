"""The layout of a safetensors file. Its writer need not hold all tensors at once."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Plan:
    """The planned content and layout of a file; nothing is copied yet."""

    head: bytes  # the start of the file, its length a multiple of 8
    places: list[tuple[int, Tensor]]  # byte offset in the file -> tensor, still the training's own
    num_bytes: int  # of the file
    # for the rank's manifest: `shapes`, `rows` of fragments, other `tensors`
    fragments: dict[str, Any]
    on_gpu: bool = False  # the tensors


def lay_out(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Plan:
    """A safetensors file: 8 bytes with the header's length, a JSON header, the tensors."""

    def place(key: str) -> tuple[int, bool, str]:
        """The widest first, so that each is aligned to its element; then weights, for exports."""
        return -tensors[key].element_size(), not key.startswith("param|"), key.partition("|")[0]

    order = sorted(tensors, key=place)  # within a slot in the order of the model
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for key in order:
        tensor, begin = tensors[key], at
        at += tensor.numel() * tensor.element_size()
        dtype, shape = DTYPES[tensor.dtype], list(tensor.shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, at]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = len(encoded).to_bytes(8, "little") + encoded
    starts = {key: len(head) + header[key]["data_offsets"][0] for key in order}  # in the file
    where = {key: (header[key]["dtype"], header[key]["shape"], starts[key]) for key in order}
    places = [(starts[key], tensors[key]) for key in order]
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    return Plan(head, places, len(head) + at, {"shapes": {}, "rows": [], "tensors": where}, on_gpu)
