"""Fit a run into the available memory: fixed parts, memory per sample, and the values of `auto`.

`clip-train plan` and `clip-train train` both call `choose_layout`, before an engine is built. It
knows sizes only (fake tensors).
"""

import math
from dataclasses import replace
from functools import cache, partial

import torch

from clip_train import dist
from clip_train.batch import BatchPlan
from clip_train.columns import Columns
from clip_train.engines.config import EngineConfig
from clip_train.errors import UserError
from clip_train.losses.tiles import GPU_SIDE
from clip_train.memory.plan import Memory, Profile, Room, cheapest_layout
from clip_train.memory.probe import fake_profile
from clip_train.models.clip import (
    build_model,
    count_parameters,
    parameter_shapes,
    shape_of_sample,
)
from clip_train.models.config import AnyArchitecture, Architecture
from clip_train.models.freeze import frozen_names, frozen_towers
from clip_train.native import blank_image, grid_of_about
from clip_train.optim.muon import BUFFER_BYTES
from clip_train.optim.optimizer import moment_bytes, muon_matrices
from clip_train.recipe.recipe import Recipe
from clip_train.recipe.resolve import Resolved, no_limit
from clip_train.settings import Recompute
from clip_train.task import IMAGE_TEXT, MicroBatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GPU_MARGIN = 0.1  # of the free memory: fragments, workspaces of libraries
# if the run cannot recover from running out of memory, because other ranks wait inside the step
UNRECOVERED_MARGIN = 0.2


def estimate_memory(
    config: Recipe,
    engine: EngineConfig,
    plan: BatchPlan,
    architecture: AnyArchitecture,
    profile: Profile | None,
) -> Memory:
    """The memory of one rank, computed from sizes alone.

    engine: the recipe's, without `auto`. profile: None leaves activations out.
    """
    P, D = count_parameters(architecture), architecture.embed_dim
    shapes = parameter_shapes(architecture)
    frozen = frozen_names(config.model, shapes)
    # elements of each trained parameter
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if name not in frozen}
    num_trained = sum(sizes.values())
    matrices = muon_matrices(config.optim, shapes).keys() & sizes
    moments = moment_bytes(config.optim, sum(sizes[name] for name in matrices) / num_trained)
    memory = engine.package.memory(engine, P, num_trained, moments, plan.world_size)
    # each rank has all teachers, unsharded
    teachers = sum(map(count_parameters, config.model.teacher_architectures()))
    largest_matrix = max((sizes[name] for name in matrices), default=0)

    # features in fp32: gathered ones, this rank's with their gradients, memory banks, group sums
    G, n, T = plan.global_size, plan.per_rank, config.data.num_texts
    banked = config.loss.bank_size if config.loss.kind == "memory_bank" else 0
    sums_groups = (config.loss.kind, config.loss.group_role) == ("info_nce", "positives")
    summed = G if sums_groups else 0
    features = 4 * D * ((1 + T) * (G + 2 * n) + 2 * banked + summed)
    widths = config.teacher_widths or [0]  # the features of one teacher at a time are gathered
    features += 4 * (1 + T) * (max(widths) * G + 2 * sum(widths) * n)
    side = GPU_SIDE if config.loss.tile == "auto" else config.loss.tile
    features += 8 * min(side, G) ** 2  # two tiles of logits, of the largest size on any device
    sample = math.prod(shape_of_sample(architecture))
    sample += 8 * T * architecture.text_cfg.context_length  # int64
    features += 2 * sample * n  # this batch and the next one
    return replace(
        memory,
        parameters=memory.parameters + DTYPES[engine.precision].itemsize * teachers,
        buffers=memory.buffers + BUFFER_BYTES * largest_matrix,
        activations=profile.bytes_for(plan) if profile else 0.0,
        features=features,
    )


def micro_batch(
    architecture: AnyArchitecture,
    device: torch.device,
    size: int,
    num_texts: int = 1,
    tokens_per_image: float | None = None,
) -> MicroBatch:
    """A micro-batch of zeros. num_texts: of each image. tokens_per_image: at native resolution,
    about as many patches; None: the most."""
    sample, length = shape_of_sample(architecture), architecture.text_cfg.context_length
    columns = Columns(
        images=torch.zeros(size, *sample, dtype=torch.uint8, device=device),
        texts=torch.zeros(size, num_texts, length, dtype=torch.int64, device=device),
        sample_seeds=torch.arange(size, device=device),
    )
    patches = architecture.patches
    if patches is None:
        return MicroBatch(columns)
    grid = grid_of_about(int(tokens_per_image or patches.most))
    image = blank_image(patches.size, patches.most, grid).to(device)
    columns = columns.plus(images=image.repeat(size, 1, 1))
    return MicroBatch(columns, num_patches=size * math.prod(grid))


SHALLOW = 2  # measured blocks of a tower; each further block needs as much memory as the last


@cache
def _profile(
    architecture: AnyArchitecture,
    precision: str,
    dropout: float,
    checkpointing: Recompute,
    frozen: frozenset[str] = frozenset(),
    num_texts: int = 1,
    tokens_per_image: float | None = None,
) -> Profile:
    """Measured with fake tensors on shallow towers; each further block adds the memory of the last.
    (Measuring all blocks of a large model would take half a minute.) Towers that OpenCLIP builds
    are measured with all blocks.

    frozen: towers without a graph, whose memory does not grow with depth. A partly frozen tower
    counts as trained.
    """
    towers = {}  # depth by (section, tower), of towers with equal blocks
    if isinstance(architecture, Architecture):
        towers["text_cfg", "text"] = architecture.text_cfg.layers
        towers["vision_cfg", "image"] = architecture.vision_cfg.layers
    shallow = {
        name: min(depth, SHALLOW + (tower in frozen)) for (name, tower), depth in towers.items()
    }

    def profile(layers: dict[str, int]) -> Profile:
        cut = {
            name: getattr(architecture, name).model_copy(update={"layers": n})
            for name, n in layers.items()
        }

        def make_model() -> torch.nn.Module:
            torch.set_default_dtype(DTYPES[precision])
            try:
                model = build_model(
                    architecture.model_copy(update=cut),
                    dropout=dropout,
                    activation_checkpointing=checkpointing,
                )
            finally:
                torch.set_default_dtype(torch.float32)
            for name, p in model.named_parameters():
                p.requires_grad_(IMAGE_TEXT.group(name) not in frozen)
            return model

        return fake_profile(
            make_model,
            partial(
                micro_batch,
                architecture,
                torch.device("cpu"),
                num_texts=num_texts,
                tokens_per_image=tokens_per_image,
            ),
        )

    total = base = profile(shallow)
    for (name, tower), depth in towers.items():
        if depth > SHALLOW and tower not in frozen:
            total = total.deeper(profile({**shallow, name: SHALLOW + 1}), base, depth - SHALLOW)
    return total


def predicted_profile(resolved: Resolved, checkpointing: Recompute) -> Profile:
    """The profile of the student, measured with fake tensors. Its `forward` covers teachers too."""
    config, architecture = resolved.config, resolved.architecture
    precision, T = config.engine.precision, config.data.num_texts
    frozen = frozen_towers(config.model, architecture)
    tokens = None
    if config.batch.micro_tokens is not None:
        # micro_tokens are as many images of this size as the plan's micro_size says
        tokens = config.tokens_per_image(architecture)
    student = _profile(
        architecture,
        precision,
        config.model.dropout,
        checkpointing,
        frozen,
        num_texts=T,
        tokens_per_image=tokens,
    )
    forwards = (
        _profile(teacher, precision, 0.0, False, num_texts=T).forward
        for teacher in config.model.teacher_architectures()
    )
    return replace(student, forward=max(student.forward, *forwards, 0))


def choose_layout(
    resolved: Resolved, limit: float | None, activations: float = float("inf")
) -> Resolved:
    """Decide every `auto`: the layout with the least work within `limit` bytes per rank, at most
    `activations` of them for activations.

    Numbers that the recipe gives are not changed. If only batch.kept_graphs is `auto`, one graph is
    kept where more cannot fit, or where the limit is unknown (None).
    """
    config, batch, plan = resolved.config, resolved.recipe.batch, resolved.plan
    one_graph = resolved
    if config.batch.kept_graphs == "auto":
        one_graph = replace(
            resolved, config=config.updated(batch={"kept_graphs": 1}), no_limit=limit is None
        )
    if limit is None or not config.chosen or not (config.needs_limit or plan.accum_steps > 1):
        return one_graph
    engine, architecture = config.engine, resolved.architecture
    checkpointing = engine.activation_checkpointing
    kept = plan.per_rank if batch.kept_graphs == "all" else batch.kept_graphs
    options: list[Recompute] = [False, True] if checkpointing == "auto" else [checkpointing]
    if checkpointing == "auto" and type(architecture) is Architecture:
        options.append("pointwise")
    fixed = estimate_memory(config, engine, plan, architecture, None).total
    room = Room(
        min(limit, fixed + activations),
        fixed,
        reduces_often=plan.world_size > 1 and not engine.reduces_once,
    )
    try:
        layout = cheapest_layout(
            plan.global_size,
            plan.world_size,
            room,
            {on: predicted_profile(resolved, on) for on in options},
            micro_size=None if batch.micro_size == "auto" else plan.micro_size,
            kept_graphs=kept if isinstance(kept, int) else None,
        )
    except UserError:
        if config.needs_limit:
            raise
        return one_graph
    config = config.updated(
        engine={"activation_checkpointing": layout.activation_checkpointing},
        batch={"micro_size": layout.plan.micro_size, "kept_graphs": layout.plan.kept_graphs},
    )
    chosen = replace(layout.plan, micro_tokens=plan.micro_tokens)
    return replace(resolved, config=config, plan=chosen, layout=layout)


def usable(resolved: Resolved, free: float) -> float:
    """The part of the `free` bytes of a GPU that `auto` may use."""
    config = resolved.config
    waits = config.engine.kind == "fsdp" or config.engine.zero_stage >= 2
    # retained graphs only save time: they must not end a run that would fit without them
    spares = resolved.plan.world_size > 1 and waits and not config.needs_limit
    return free * (1 - (UNRECOVERED_MARGIN if spares else GPU_MARGIN))


def memory_limit(resolved: Resolved, device: torch.device | None) -> float | None:
    """Bytes that a rank may use: from the recipe, else the smallest free memory of `device` over
    all ranks. None if it is unknown and no key needs it; UserError if one does.

    device: None if there is none, or if it may not be looked at.
    """
    config = resolved.config
    if config.batch.memory_limit is not None:
        return float(config.batch.memory_limit)
    if device is not None and device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return -dist.max_scalars(-usable(resolved, free))[0]
    if config.needs_limit:
        raise UserError(no_limit(config))
    return None
