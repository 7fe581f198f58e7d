"""The tensors of a TorchScript archive, such as OpenAI's ViT-B-32.pt; none of the code in it runs.

It is a zip: `data.pkl` is the tree of modules, `data/N` the storages. Of `data.pkl` an unpickler makes tensors, plain
containers, and bare trees instead of the archive's own classes; it knows no other name.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


def is_torchscript(file: Path) -> bool:
    """As torch tells it from what `torch.save` writes."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def read_torchscript(file: Path) -> dict[str, Tensor]:
    """Every tensor of the tree by its dotted name. pickle.UnpicklingError and its kin for what is not such a tree."""
    with zipfile.ZipFile(file) as archive:
        root = next(
            name for name in archive.namelist() if name.endswith("/constants.pkl")
        ).rpartition("/")[0]
        with archive.open(f"{root}/data.pkl") as data:
            tree = _TreeUnpickler(data, archive, root).load()
        return dict(_tensors(tree, ""))


class _Module:
    """Stands for an object of any class that the archive defines: its attributes."""

    attributes: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.attributes = state


class _TreeUnpickler(pickle.Unpickler):
    def __init__(self, data: Any, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(data)
        self._archive, self._root = archive, root
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".", maxsplit=1)[0] == "__torch__":
            return _Module
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: storage.as_strided(
                size, stride, offset
            )
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch.jit._pickle" and name.startswith(
            "build_"
        ):  # a list of numbers, or of tensors
            return list
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Any) -> Tensor:
        """("storage", dtype, its file's name, device, number of elements) -> all elements, [n]"""
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it holds a {kind!r}, not a storage")
        if key not in self._storages:
            info = self._archive.getinfo(f"{self._root}/data/{key}")
            if info.file_size != numel * dtype.itemsize:
                raise pickle.UnpicklingError(
                    f"{info.filename} has {info.file_size} bytes, not {numel} of {dtype}"
                )
            data = bytearray(self._archive.read(info))  # the zip's checksum is compared on the way
            self._storages[key] = (
                torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            )
        return self._storages[key]


def _tensors(tree: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, value in tree.attributes.items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, _Module):
            yield from _tensors(value, f"{prefix}{name}.")
