"""`clip-train plan`: the plan of a run before it is submitted."""

import argparse
import json

from clip_train.errors import raise_all
from clip_train.metrics.gpus import GPUS
from launcher.cli.arguments import add_help, add_json, add_overrides, add_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        "Print the plan of a run: batch arithmetic, memory by part, steps. Touches no GPU.",
        """
        clip-train plan recipes/vit_b32.yaml --world-size 64
        clip-train plan recipes/vit_b32.yaml --world-size 8 batch.micro_size=auto --gpu H200
        clip-train plan recipes/vit_l14.yaml --world-size 64 --gpu H200     what fits
        clip-train plan recipes/vit_bigg14.yaml --world-size 128 --gpu H100 --network 8x400Gb
        """,
    )
    add_recipe(parser)
    add_overrides(parser)
    parser.add_argument("--world-size", metavar="N", type=int, default=1, help="ranks (default: 1)")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="H200, H100, A100-80, ...: its memory limits; the choices of auto; communication",
    )
    parser.add_argument(
        "--network",
        metavar="SPEED",
        help="with --gpu: Gbit/s of a node, all of its adapters together: 400Gb, 8x400Gb",
    )
    parser.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=int,
        default=8,
        help="one rank per GPU (default: 8)",
    )
    add_json(parser)


def run(
    recipe: str,
    overrides: list[str],
    world_size: int,
    gpu: str | None,
    network: str | None,
    gpus_per_node: int,
    as_json: bool,
) -> int:
    from clip_train.settings import broken

    rules = [
        (world_size < 1, f"--world-size ({world_size}) must be at least 1"),
        (gpus_per_node < 1, f"--gpus-per-node ({gpus_per_node}) must be at least 1"),
        (
            network is not None and gpu is None,
            f"--network ({network}) needs --gpu, because the estimate uses the GPU's links and "
            "speed",
        ),
        (
            gpu is not None and gpu.upper() not in GPUS,
            f"--gpu ({gpu}) is not known: use one of {', '.join(GPUS)}, or batch.memory_limit=80GB",
        ),
    ]
    raise_all(broken(rules))

    from clip_tools.plan import make_plan, show
    from clip_train.recipe.recipe import load_config
    from clip_train.recipe.resolve import resolve
    from launcher.checks import continues

    config = load_config(recipe, overrides)
    properties = GPUS[gpu.upper()] if gpu else None
    if properties:
        engine = config.engine.on(properties.bf16, world_size, gpus_per_node)
        config = config.updated(engine=dict(engine))
    resolved = resolve(
        config,
        world_size,
        per_node=gpus_per_node,
        read_data=False,
        look_for_weights=not continues(config, network=False),
    )
    plan = make_plan(resolved, properties, network, gpus_per_node)
    if as_json:
        print(json.dumps(plan, indent=2))
    else:
        show(plan)
    return 0
