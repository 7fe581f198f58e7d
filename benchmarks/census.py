"""The kernels that inductor makes of the compiled parts of a step on an sm_90 GPU, counted without a GPU.

    pip install triton==3.7.*                   the one that fits this torch; the CPU build of torch does not bring it
    python benchmarks/census.py [MODEL] [--images N] [--texts N] [--tokens N] [--json FILE] [--kernels]

It compiles what a run compiles: `compile_units` wraps a CLIP in bf16, and torch.compile gets inductor's own passes and
lowering. Only what inductor hands to the GPU is replaced: the pretended GPU (tests/pretended) gives fake tensors, and
Triton compiles the kernels for sm_90 with its ptxas. Parts: the pixels of --images images, an image block, the same two
at native resolution with as many tokens, a text block with --texts texts of --tokens tokens, packed and padded, and the
last text block, which computes one token a text.
Each without and with `engine.own_kernels`.

For each part and pass: Triton kernels, library calls, the megabytes that each kind reads and writes, the most SASS
instructions an element of a pointwise kernel, and the registers, spills and shared memory that ptxas reports.
Nothing runs, so nothing is autotuned: of a kernel with several configurations the first is compiled.
"""

# ruff: noqa: I001
from __future__ import annotations

import copy
import importlib.util
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from torch._C import DisableTorchFunction
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    _recursive_record_original_output_strides,
    compile_fx,
    fake_tensor_prop,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.runtime import triton_helpers
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.utils import shape_env_from_inputs, sympy_product
from torch._inductor.virtualized import V
from triton.backends.compiler import GPUTarget

from clip_train.models.blocks import Packing
from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.engines.compile import compile_units

MOST = {"pixels": 30, "cat": 20, "stack": 20}  # SASS instructions an element
BACKWARD_MB = 2450  # of an image block's own kernels, for 1,024 images of ViT-B/32
TARGETS = {
    "spills": "no kernel spills registers",
    "instructions": "an element of the pixels takes at most 30 instructions, of a cat or a stack at most 20",
    "bytes": "with own kernels an image block's backward moves at most 2,450 MB beside its library calls (1,024 images"
    " of ViT-B/32)",
}
TRITON_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.S)  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?[A-Z]")
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
    torch.cuda._exchange_device = lambda *_: 0  # type: ignore[assignment]
    torch.cuda._maybe_exchange_device = lambda *_: 0  # type: ignore[assignment]
    joint_graph.lazy_init(
        torch.device("cpu")
    )  # patterns of attention etc., which need real tensors
    joint_graph.lazy_init = lambda *_: None  # type: ignore[assignment]
    inductor.joint_graph_constant_folding = False  # it makes real tensors
    inductor.compile_threads, inductor.fx_graph_cache = 1, False
    inductor.use_static_triton_launcher = False


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """The kernels that a GPU takes in half precision; the CPU build cannot choose among them."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    bias = attn_mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]


@dataclass
class Launch:
    """A kernel or a library call, in the order of the scheduler."""

    name: str
    library: bool
    megabytes: float


@dataclass
class Graph:
    """One pass of one part, as inductor lowers it."""

    code: str
    launches: list[Launch]


@dataclass
class Recorder:
    """Takes the place of inductor's compiler of graphs: it lowers each graph and keeps the result."""

    graphs: dict[str, Graph] = field(
        default_factory=dict
    )  # "forward" or "backward" -> the last one

    def __call__(
        self, gm: torch.fx.GraphModule, inputs: list[Any], **more: Any
    ) -> Callable[..., Any]:
        is_backward = more.get("is_backward", False)
        lowered = copy.deepcopy(
            gm
        )  # the passes change it, and the pretended step runs the original
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(V.set_fake_mode(detect_fake_mode(inputs)))
            view_to_reshape(lowered)
            fake_tensor_prop(lowered, inputs)
            _recursive_record_original_output_strides(lowered)
            _recursive_post_grad_passes(lowered, is_inference=False)
            graph = GraphLowering(
                lowered,
                example_inputs=inputs,
                shape_env=shape_env_from_inputs(inputs),
                is_backward=is_backward,
            )
            stack.enter_context(V.set_graph_handler(graph))
            stack.enter_context(V.set_extern_kernel_nodes([]))
            stack.enter_context(V.set_debug_handler(DebugContext()))
            graph.run(*inputs)
            code = graph.codegen()[0].value
            launches = [launch for node in graph.scheduler.nodes for launch in launches_of(node)]
        self.graphs["backward" if is_backward else "forward"] = Graph(code, launches)
        return make_boxed_func(gm.forward)


def launches_of(node: BaseSchedulerNode) -> Iterator[Launch]:
    """The launch of a scheduled node; none for one that only makes a view."""
    if isinstance(node, NopKernelSchedulerNode):
        return
    size = node.get_read_write_buffers_sizes()
    kernel = node.node if isinstance(node, ExternKernelSchedulerNode) else None
    library = kernel is not None and not isinstance(kernel, UserDefinedTritonKernel)
    if isinstance(kernel, UserDefinedTritonKernel):  # its new tensors count as read and written
        size -= sum(bytes_of(each) for each in kernel.mutable_args)
    megabytes = size / 1e6
    name = "+".join(sorted(origins(node)))
    if library:
        name = str(
            getattr(kernel, "python_kernel_name", None) or getattr(kernel, "op_overload", None)
        )
    if megabytes > 0:
        yield Launch(name, library, megabytes)


def bytes_of(buffer: Any) -> int:
    elements = V.graph.sizevars.optimization_hint(sympy_product(buffer.get_size()))
    return elements * buffer.get_dtype().itemsize


def origins(node: BaseSchedulerNode) -> set[str]:
    """The operators of torch that a node computes."""
    return {
        str(origin.target).removeprefix("aten.").split(".")[0]
        for each in node.get_nodes()
        if each.node is not None
        for origin in each.node.get_origins()
    }


@dataclass
class Part:
    """A compiled part of a step, and the inputs of one micro-batch."""

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]


def parts(model: str, images: int, texts: int, tokens: int, own_kernels: bool) -> Iterator[Part]:
    """Of a compiled CLIP whose towers have two blocks each."""
    architecture = load_architecture(model)
    vision, text = (
        getattr(architecture, tower).model_copy(update={"layers": 2})
        for tower in ("vision_cfg", "text_cfg")
    )
    clip = CLIP(architecture.model_copy(update={"vision_cfg": vision, "text_cfg": text}))
    compile_units(clip, own_kernels)
    side = vision.image_size
    pixels = torch.empty(images, 3, side, side, dtype=torch.uint8)
    yield Part("pixels", clip.visual.conv1, (pixels,))
    tokens_of_image = (side // vision.patch_size) ** 2 + 1
    x = torch.empty(images, tokens_of_image, vision.width, requires_grad=True)
    yield Part("image", clip.visual.transformer.resblocks[0], (x, None, None, None))
    # native resolution: images one after another, with as many tokens in all
    num_tokens = images * tokens_of_image
    rows = torch.empty(num_tokens, 3 * vision.patch_size**2, dtype=torch.uint8)
    yield Part("pixels, native", clip.visual.conv1, (rows,))
    last = torch.empty(images, dtype=torch.int64)
    packing = Packing.of(last, tokens_of_image, num_tokens, None, flash=True, reads_first=True)
    x = torch.empty(num_tokens, 1, vision.width, requires_grad=True)
    yield Part("image, native", clip.visual.transformer.resblocks[0], (x, None, None, packing))
    whole = torch.empty(texts, text.context_length, text.width, requires_grad=True)
    yield Part("text, padded", clip.transformer.resblocks[0], (whole, None, None, None))
    ends = torch.empty(texts, dtype=torch.int64)
    packing = Packing.of(ends, text.context_length, texts * tokens, None, flash=True)
    packed = torch.empty(texts * tokens, 1, text.width, requires_grad=True)
    yield Part("text, packed", clip.transformer.resblocks[0], (packed, None, None, packing))
    yield Part("last text, packed", clip.transformer.resblocks[-1], (packed, None, ends, packing))


def graphs(
    model: str, images: int, texts: int, tokens: int, own_kernels: bool
) -> Iterator[tuple[str, str, Graph]]:
    """Part, pass, graph. A part that stays eager has none."""
    torch_compile = torch.compile
    recorder = Recorder()

    def captured(function: Any, options: Any = None, **more: Any) -> Callable[..., Any]:
        backend = partial(compile_fx, inner_compile=recorder)
        compiled = torch_compile(function, backend=backend, **more)

        def call(*inputs: Any, **named: Any) -> Any:
            with DisableTorchFunction():  # the pretended GPU's counter of reads
                return compiled(*inputs, **named)

        return call

    torch._dynamo.reset()
    torch.compile = captured  # type: ignore[assignment]
    with pretended_gpu(), torch.device("cuda"):
        F.scaled_dot_product_attention = attention  # type: ignore[assignment]
        torch.set_default_dtype(torch.bfloat16)
        for part in parts(model, images, texts, tokens, own_kernels):
            recorder.graphs = {}
            out = part.module.forward(*part.inputs)
            out.sum().backward()
            for name, graph in recorder.graphs.items():
                yield part.name, name, graph
    torch.compile = torch_compile


def compiled_kernel(name: str, source: str, folder: Path) -> Row:
    """A Triton kernel's first configuration, compiled for sm_90."""
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner = getattr(module, name)
    config = tuner.configs[0]
    kernel = tuner._precompile_config(config).kernel
    cubin = folder / f"{name}.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    shown = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True)  # fmt: skip
    registers, local = (int(re.findall(rf"{key}:(\d+)", shown.stdout)[-1]) for key in ("REG", "LOCAL"))  # fmt: skip
    row: Row = {"registers": registers, "spilled bytes": local, "shared bytes": kernel.metadata.shared}  # fmt: skip
    if "_poi_" in name:
        shown = subprocess.run([CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True)  # fmt: skip
        block = math.prod(size for key, size in config.kwargs.items() if key.endswith("BLOCK"))
        elements = block / (32 * config.num_warps)  # of a thread
        row["instructions"] = round(len(INSTRUCTION.findall(shown.stdout)) / elements, 1)
    return row


def kernels(part: str, name: str, graph: Graph) -> Iterator[Row]:
    """Every Triton kernel of a graph with what ptxas made of it."""
    with tempfile.TemporaryDirectory() as folder:
        for kernel, source in TRITON_KERNEL.findall(graph.code):
            row = {"part": part, "pass": name, "kernel": kernel.removeprefix("triton_")}
            yield row | compiled_kernel(kernel, source, Path(folder))


def summary(part: str, name: str, graph: Graph, found: list[Row]) -> Row:
    own = [launch for launch in graph.launches if not launch.library]
    library = [launch for launch in graph.launches if launch.library]
    row: Row = {"part": part, "pass": name, "kernels": len(own), "library calls": len(library)}
    row["MB"] = round(sum(launch.megabytes for launch in own))
    row["library MB"] = round(sum(launch.megabytes for launch in library))
    for key in ("instructions", "registers", "spilled bytes", "shared bytes"):
        row[f"most {key}"] = max((kernel.get(key, 0) for kernel in found), default=0)
    return row


def missed_targets(rows: list[Row], found: list[Row], with_bytes: bool) -> Iterator[str]:
    for kernel in found:
        where = f"{kernel['part']}, {kernel['pass']}, {kernel['kernel']}"
        if kernel["spilled bytes"]:
            yield f"{where}: spills {kernel['spilled bytes']} bytes"
        kind = "pixels" if kernel["part"].startswith("pixels") else ""
        kind = next((each for each in ("cat", "stack") if f"_{each}_" in kernel["kernel"]), kind)
        if kind and kernel.get("instructions", 0) > MOST[kind]:
            yield f"{where}: {kernel['instructions']} instructions an element"
    for row in rows:
        backward = (row["part"], row["pass"], row["own kernels"]) == ("image", "backward", "yes")
        if with_bytes and backward and row["MB"] > BACKWARD_MB:
            yield f"image, backward: {row['MB']} MB"


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("model", nargs="?", default="ViT-B-32", metavar="MODEL")
    arguments.add_argument("--images", type=int, default=1024)
    arguments.add_argument("--texts", type=int, default=2048)
    arguments.add_argument("--tokens", type=int, default=20, help="of a packed text, on average")
    arguments.add_argument("--kernels", action="store_true", help="print each launch and kernel")
    arguments.add_argument("--code", metavar="FOLDER", help="write inductor's code there")
    args = arguments.parse_args()
    pretend()
    rows: list[Row] = []
    every: list[Row] = []
    for own_kernels in (False, True):
        for part, name, graph in graphs(
            args.model, args.images, args.texts, args.tokens, own_kernels
        ):
            if args.code:
                file = f"{part}_{name}{'_own' if own_kernels else ''}.py".replace(", ", "_")
                Path(args.code, file).write_text(graph.code)
            found = list(kernels(part, name, graph))
            own = "yes" if own_kernels else "no"
            rows.append({"own kernels": own} | summary(part, name, graph, found))
            every += found
            if args.kernels:
                print(f"{part}, {name}, own kernels: {own}")
                for launch in graph.launches:
                    print(f"  {launch.megabytes:8.1f} MB  {launch.name}")
                for kernel in found:
                    print("  ", *(f"{key} {kernel[key]}" for key in list(kernel)[2:]))
    with_bytes = (args.model, args.images) == ("ViT-B-32", 1024)
    missed = list(missed_targets(rows, every, with_bytes))
    return finish("census", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
