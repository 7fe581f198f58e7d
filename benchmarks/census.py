"""Which kernels inductor makes of a transformer block on an sm_90 GPU, counted on a machine without one.

    pip install triton==3.7.*                           the one of this torch; the CPU's torch does not bring it
    python benchmarks/census.py [MODEL] [--json FILE]   of its last image block, bf16, forward and backward

The pretended GPU (tests/pretended) gives inductor fake tensors; Triton compiles the kernels for sm_90 with its ptxas.
For each pass: Triton kernels, calls of libraries, and the registers, spills and shared memory that ptxas reports.
Nothing runs, so nothing is autotuned: of a kernel with several configurations the first is compiled. What inductor
does before lowering to a graph (its fusions of patterns) is left out.
"""

# ruff: noqa: I001
from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.pretended.gpu import PROPERTIES, pretended_gpu  # before torch

import torch
import torch.nn.functional as F
import triton.runtime.driver
from common import finish, parser
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from triton.backends.compiler import GPUTarget

from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from launcher.engines.compile import units

BATCH = 256
TARGETS = {"spills": "no kernel spills registers"}
TRITON_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.S)  # fmt: skip
LIBRARY_CALL = re.compile(
    r"(?m)^(?!\s*#).*?(extern_kernels\.\w+|torch\.ops\.aten\._scaled_dot\w+\.default)\("
)
Row = dict[str, Any]


class Driver:
    """What inductor asks Triton's driver for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def pretend() -> None:
    more = {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "warp_size": 32}  # fmt: skip
    more |= {"shared_memory_per_block_optin": 232448, "L2_cache_size": 50 << 20, "gcnArchName": ""}
    vars(PROPERTIES).update(more)
    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    for interface in (CudaInterface, CudaInterface.Worker):
        interface.get_device_properties = staticmethod(lambda *_: PROPERTIES)  # type: ignore[assignment]
    CudaInterface.is_available = staticmethod(lambda: True)  # type: ignore[method-assign]
    CudaInterface.get_compute_capability = staticmethod(lambda *_: 90)  # type: ignore[assignment]
    inductor.compile_threads, inductor.fx_graph_cache = 1, False
    inductor.use_static_triton_launcher = False


def flash(q: Tensor, k: Tensor, v: Tensor, *_: Any, is_causal: bool = False, **more: Any) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


class Image(nn.Module):
    """A block as a function of one tensor."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.block(x, None),)


def codes(model: str) -> dict[str, str]:
    """Inductor's code of both passes."""
    found: dict[str, str] = {}

    def compiler(name: str, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with ExitStack() as stack:
            stack.enter_context(V.set_fake_mode(detect_fake_mode(inputs)))
            graph = GraphLowering(gm, example_inputs=inputs, is_backward=name == "backward")
            stack.enter_context(V.set_graph_handler(graph))
            stack.enter_context(V.set_extern_kernel_nodes([]))
            stack.enter_context(V.set_debug_handler(DebugContext()))
            graph.run(*inputs)
            found[name] = graph.codegen()[0].value
        return make_boxed_func(gm.forward)

    architecture = load_architecture(model)
    vision = architecture.vision_cfg
    length = (vision.image_size // vision.patch_size) ** 2 + 1
    with pretended_gpu():
        F.scaled_dot_product_attention = flash  # type: ignore[assignment]
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            block = units(CLIP(architecture).visual)[-1]
        size = (BATCH, length, vision.width)
        x = torch.empty(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        compiled = aot_module_simplified(
            Image(block),
            (x,),
            fw_compiler=partial(compiler, "forward"),
            bw_compiler=partial(compiler, "backward"),
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )
        compiled(x)[0].sum().backward()
    return found


def resources(name: str, source: str, folder: Path) -> Row:
    """Of a kernel's first configuration, compiled for sm_90."""
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner = getattr(module, name)
    kernel = tuner._precompile_config(tuner.configs[0]).kernel
    cubin = folder / f"{name}.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    shown = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    registers, local = (int(re.findall(rf"{key}:(\d+)", shown.stdout)[-1]) for key in ("REG", "LOCAL"))  # fmt: skip
    return {"registers": registers, "spilled bytes": local, "shared bytes": kernel.metadata.shared}


def rows(model: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for name, code in codes(model).items():
            kernels = TRITON_KERNEL.findall(code)
            used = [resources(kernel, source, Path(folder)) for kernel, source in kernels]
            calls = LIBRARY_CALL.findall(code)
            row = {"pass": name, "Triton kernels": len(kernels), "library calls": len(calls)}
            yield row | {f"most {key}": max(each[key] for each in used) for key in used[0]}


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("model", nargs="?", default="ViT-B-32", metavar="MODEL")
    args = arguments.parse_args()
    pretend()
    found = list(rows(args.model))
    missed = [f"{row['pass']}: registers" for row in found if row["most spilled bytes"]]
    return finish("census", found, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
