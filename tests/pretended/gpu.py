"""A pretended GPU: FakeTensorMode with device `cuda` on a CPU-only torch, backward included. Import before torch.

Tensors have shapes and no values. A mixture of devices raises; each time the host reads from the device is counted
with its place, and so is each kernel. It cannot see numbers, which types a kernel takes, or streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.pretended.build import guard

ctypes.CDLL(str(guard()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as td  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from tests.served import foreign  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")
# No kernel: they make another view, or memory that is not written to.
NO_KERNELS = """
    view _unsafe_view t transpose permute select slice unsqueeze squeeze expand split split_with_sizes detach alias
    as_strided unbind diagonal empty empty_like new_empty empty_strided _reshape_alias lift_fresh new_empty_strided
    view_as_real view_as_complex unfold record_stream resize_
"""
FREE = frozenset(NO_KERNELS.split())
LARGE = 2**20  # elements: of a float64 tensor that does not belong on a GPU


PROPERTIES = SimpleNamespace(
    name="a pretended H200", total_memory=141 * 10**9, major=9, minor=0, multi_processor_count=132
)


@dataclass
class Counts:
    """What the pretended GPU saw."""

    reads: Counter[str] = field(
        default_factory=Counter
    )  # place -> times that the host waited for the device
    kernels: Counter[str] = field(default_factory=Counter)  # operator -> launches
    wide: Counter[str] = field(
        default_factory=Counter
    )  # operator -> float64 results of LARGE elements and more
    foreign: Counter[str] = field(
        default_factory=Counter
    )  # collective -> tensors on a device that its group does not serve
    sent: int = 0  # collectives
    # name of a collective with a tensor on the device -> calls
    collectives: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        for counter in (self.reads, self.kernels, self.wide):
            counter.clear()

    def as_json(self) -> dict[str, Any]:
        return {
            "reads": dict(self.reads),
            "kernels": sum(self.kernels.values()),
            "wide": dict(self.wide),
            "foreign": dict(self.foreign),
            "sent": self.sent,
            "collectives": dict(self.collectives),
            "top": self.kernels.most_common(12),
        }


def place() -> str:
    """The line of the project that is being run."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and not {"pretended", "site-packages"} & {*path.parts}:
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "?"


def on_gpu(x: Any) -> bool:
    return isinstance(x, FakeTensor) and x.device.type == "cuda"


class Reads(TorchFunctionMode):
    """Counts reads of the device, and answers them with a plausible number."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, x = kwargs or {}, getattr(func, "__name__", ""), args[0] if args else None
        if func is torch.tensor and _is(kwargs.get("device"), "cuda"):
            self._count("copy to the device")
            return torch.empty(
                torch.tensor(x).shape,
                dtype=kwargs.get("dtype") or torch.tensor(x).dtype,
                device="cuda",
            )
        if isinstance(x, FakeTensor) and name in NUMBERS:
            if on_gpu(x):
                self._count(name)
            value = _plausible(x)
            return [value] * x.numel() if name == "tolist" and x.dim() else value
        target = next(
            (
                each
                for each in (*args[1:], *kwargs.values())
                if isinstance(each, (str, torch.device))
            ),
            None,
        )
        if on_gpu(x) and (name in ("cpu", "nonzero") or (name == "to" and _is(target, "cpu"))):
            self._count(name)
        from_device = name == "copy_" and not on_gpu(x) and on_gpu(args[1])
        if from_device and not (kwargs.get("non_blocking") or True in args[2:]):
            self._count("copy to the host")
        to_device = (
            name == "to"
            and isinstance(x, Tensor)
            and x.device.type == "cpu"
            and _is(target, "cuda")
        )
        if to_device and not kwargs.get("non_blocking"):
            self._count("copy to the device")
        return func(*args, **kwargs)

    def _count(self, what: str) -> None:
        self.counts.reads[f"{place()} {what}"] += 1


def _plausible(x: Tensor) -> float:
    """float64 on the host: what ranks decide together, and none has anything to report."""
    if x.dtype == torch.bool:
        return False
    return 1.5 if x.is_floating_point() and (on_gpu(x) or x.dtype != torch.float64) else 0


def _is(device: Any, kind: str) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == kind


class Kernels(TorchDispatchMode):
    """Counts operators that write to the device, and looks at what is sent through which group."""

    supports_higher_order_operators = True  # Triton kernels, where Triton is installed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would compile nothing

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._look(func, args)
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type == "cuda"]
        if made and name not in FREE:
            self.counts.kernels[name] += 1
            if any(x.dtype == torch.float64 and x.numel() >= LARGE for x in made):
                self.counts.wide[f"{place()} {name}"] += 1
        return out

    def _look(self, func: Any, args: tuple) -> None:
        group = next((x for x in args if isinstance(x, torch.ScriptObject)), None)
        sent = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if any(x.device.type == "cuda" for x in sent):
            self.counts.collectives[func.__name__.split(".")[0]] += 1
        found = ["a group known by its name"]  # DTensor's way, which nothing here takes
        if group is not None:
            self.counts.sent += 1
            found = foreign(sent, td.ProcessGroup.unbox(group))
        for device in found:
            self.counts.foreign[f"{place()} {func.__name__}: {device}"] += 1


class Stream:
    """Of a device on which nothing takes time; to wait for it on the host is a read."""

    synchronized: Callable[..., Any] = lambda *args: None
    device_index, cuda_stream = 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        type(self).synchronized()

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return False  # the host runs ahead: nothing is done yet

    def wait_event(self, event: Event) -> None: ...
    def wait_stream(self, stream: Stream) -> None: ...
    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: Any) -> None: ...


class Event(Stream):
    """The same, of an event."""

    def elapsed_time(self, later: Event) -> float:
        return 1.0  # milliseconds


@contextlib.contextmanager
def pretended_gpu() -> Iterator[Counts]:
    """Inside, tensors on `cuda` are pretended ones, and the counts grow."""
    counts = Counts()

    def read(what: str, answer: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            counts.reads[f"{place()} {what}"] += 1
            return answer()

        return called

    replaced = {
        "synchronize": read("synchronize"),
        # the state lies on the host: reading it waits for nothing
        "get_rng_state": lambda *args: torch.empty(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda *args: None,
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "max_memory_reserved": lambda *args: 0,
        "reset_peak_memory_stats": lambda *args: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args, **options: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *args: (9, 0),
        "get_device_properties": lambda *args: PROPERTIES,
        "nvtx": SimpleNamespace(
            range_push=lambda *args, **kwargs: 0, range_pop=lambda *args, **kwargs: 0
        ),
        "get_device_name": lambda *args: "a pretended GPU",
        "current_device": lambda: 0,
        "set_device": lambda *args: None,
        "empty_cache": lambda: None,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda *args: 0, cudaHostUnregister=lambda *args: 0
        ),
        "_lazy_init": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "default_stream": Stream,
        "set_stream": lambda *args: None,
        "stream": Stream,
    }
    Stream.synchronized = read("synchronize")  # type: ignore[method-assign]
    saved = {name: getattr(torch.cuda, name) for name in replaced}
    attention, record_stream = (
        torch.nn.functional.scaled_dot_product_attention,
        Tensor.record_stream,
    )
    Tensor.record_stream = lambda *args: None  # type: ignore[method-assign]
    pin_memory = Tensor.pin_memory
    Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]
    for name, new in replaced.items():
        setattr(torch.cuda, name, new)
    torch.nn.functional.scaled_dot_product_attention = _attention(attention)  # type: ignore[assignment]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Reads(counts), Kernels(counts):
            yield counts
    finally:
        torch.nn.functional.scaled_dot_product_attention = attention
        Tensor.record_stream = record_stream  # type: ignore[method-assign]
        Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
        for name, old in saved.items():
            setattr(torch.cuda, name, old)


def _attention(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel that a GPU would choose; the CPU build cannot choose among CUDA's and takes the plain one."""

    def chosen(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **more: Any,
    ) -> Tensor:  # fmt: skip
        if not on_gpu(q):
            return usual(
                q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **more
            )
        if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
            return torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal
            )[0]
        bias = None
        if attn_mask is not None:
            bias = torch.zeros_like(attn_mask, dtype=q.dtype).expand(*q.shape[:3], k.shape[2])
        with_graph = q.requires_grad or k.requires_grad
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(q, k, v, bias, with_graph, dropout_p, is_causal)[0]

    return chosen
