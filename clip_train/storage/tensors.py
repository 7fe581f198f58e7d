"""The layout of a safetensors file, for writers that do not have all tensors in memory at once."""

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
class FilePlan:
    """The planned content and layout of a file; nothing is copied yet."""

    head: bytes  # the start of the file, its length a multiple of 8
    contents: list[tuple[int, Tensor]]  # byte offset in the file, and the tensor (not a copy)
    num_bytes: int  # of the file
    # for the rank's manifest: `shapes`, `rows` of fragments, other `tensors`
    fragments: dict[str, Any]
    on_gpu: bool = False  # a tensor is on a GPU


def lay_out(tensors: dict[str, Tensor], metadata: dict[str, str]) -> FilePlan:
    """Plan a safetensors file: 8 bytes with the header's length, a JSON header, the tensors."""

    def position(key: str) -> tuple[int, bool, str]:
        """The widest elements first, so that each tensor is aligned; then weights, for exports."""
        return -tensors[key].element_size(), not key.startswith("param|"), key.partition("|")[0]

    order = sorted(tensors, key=position)  # a stable sort: the model's order within a slot
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0  # bytes, counted from the end of the header
    for key in order:
        tensor = tensors[key]
        start = end
        end += tensor.numel() * tensor.element_size()
        dtype, shape = DTYPES[tensor.dtype], list(tensor.shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = len(encoded).to_bytes(8, "little") + encoded
    offsets = {key: len(head) + header[key]["data_offsets"][0] for key in order}  # in the file
    entries = {key: (header[key]["dtype"], header[key]["shape"], offsets[key]) for key in order}
    return FilePlan(
        head=head,
        contents=[(offsets[key], tensors[key]) for key in order],
        num_bytes=len(head) + end,
        fragments={"shapes": {}, "rows": [], "tensors": entries},
        on_gpu=any(tensor.is_cuda for tensor in tensors.values()),
    )
