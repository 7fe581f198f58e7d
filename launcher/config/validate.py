"""What is known about a recipe before anything is built: all its mistakes at once, or the plan that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from clip_train.batch import BatchPlan, plan_batch
from clip_train.data.config import SourceSummary, check_source, existing, resolve_streams
from clip_train.data.shards import expand_braces
from clip_train.data.validation import ImageFolder
from clip_train.errors import RankError, UserError
from clip_train.evaluate.labels import Labelled, check_labels
from clip_train.evaluate.zero_shot import ZeroShotClasses
from clip_train.memory.plan import RECOMPUTED, Layout
from clip_train.models import hub
from clip_train.models.clip import parameter_sizes
from clip_train.models.config import AnyArchitecture
from clip_train.models.freeze import trained_parameters
from clip_train.optim.optimizer import lr_factors, needs, spared
from launcher.config.recipe import RunConfig
from launcher.engines import Facts, find_engine, on_this_machine
from launcher.engines.config import EngineConfig


@dataclass(frozen=True)
class Checked:
    """What the checks before launch have found out."""

    plan: BatchPlan
    architecture: AnyArchitecture
    streams: int
    engine: EngineConfig  # the recipe's with this machine's precision; after a look at memory without `auto`
    layout: Layout | None = None  # where something is `auto`: what it has become
    source: SourceSummary | None = None  # on the rank that has looked at the shards


def check(
    config: RunConfig, world_size: int, *, read_data: bool = True, is_rank: bool = False
) -> Checked:
    """Every mistake that can be found without a process group. UserError, all of them at once.

    is_rank: this process is to train, so its devices have to do for the recipe.
    """
    problems: list[UserError] = []

    def collect(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UserError as e:
            problems.append(e)
            return None

    architecture = collect(config.model.architecture)
    if architecture is not None:
        if (config.loss.kind == "sigmoid") != (architecture.init_logit_bias is not None):
            problems.append(UserError(bias_mistake(config, architecture.init_logit_bias)))
        collect(config.model.teacher_architecture)
        model = config.model
        given = (model.init_from, model.init_image_from, model.init_text_from, model.teacher)
        collect(
            lambda: [
                hub.resolve(place) for place in given if place is not None and hub.is_on_hub(place)
            ]
        )
        collect(partial(trained_parameters, config.model, architecture))
        if not architecture.layered and config.optim.layer_decay != 1:
            problems.append(UserError(layers_mistake(config)))
        names = parameter_sizes(architecture)
        collect(partial(lr_factors, config.optim, names))
        collect(partial(spared, config.optim, names))
    plan = collect(lambda: plan_batch(config.batch, world_size))
    engine, resolved = find_engine(config.engine.kind), on_this_machine(config.engine)
    problems += map(
        UserError, [*engine.mistakes_here(resolved), *config.log.mistakes_here()] if is_rank else ()
    )
    streams = resolve_streams(config.data.lanes, config.batch.sizes)
    if (
        read_data
        and config.chosen
        and config.batch.memory_limit is None
        and not torch.cuda.is_available()
    ):
        problems.append(UserError(no_limit(config)))
    source = None
    if read_data:
        source = collect(lambda: check_source(config.data, config.storage))
    else:
        for key, place in {"data.train": config.data.train, **config.evaluated_on}.items():
            collect(partial(expand_braces, place, key))
    if read_data and config.evaluate.zero_shot_classes is not None:
        collect(partial(ZeroShotClasses.load, config.evaluate.zero_shot_classes))
    for key, place in config.evaluated_on.items() if read_data else ():
        collect(partial(check_place, key, place))
    collect(lambda: labels_of(config) if read_data and not problems else None)
    if not (problems and config.optim.is_imported):  # the import runs code: after all other checks
        facts = collect(lambda: engine_facts(config, plan, world_size))
        problems += map(UserError, engine.mistakes(resolved, facts) if facts is not None else ())
    if problems or plan is None:
        if len(problems) == 1:
            raise problems[0]
        kind = (
            RankError if all(isinstance(problem, RankError) for problem in problems) else UserError
        )
        raise kind("\n  ".join([f"{len(problems)} mistakes", *map(str, problems)]))
    return Checked(plan, architecture, streams, resolved, source=source)


def check_place(key: str, place: str) -> None:
    """UserError, RankError where what is to be evaluated on is not there."""
    if key == "data.val" or ImageFolder.find(place, key) is None:
        existing(place, key)


def labels_of(config: RunConfig) -> list[Labelled]:
    """What the first samples to be evaluated on show of their labels. UserError where one is not a class."""
    return check_labels(config.evaluate, config.data.val, config.data.caption_key, config.storage)


def engine_facts(config: RunConfig, plan: BatchPlan | None, world_size: int) -> Facts:
    return Facts(
        world_size,
        micro_size=plan.micro_size if plan else 1,
        grad_clip_norm=config.optim.grad_clip_norm,
        optimizer=(config.optim.name, needs(config.optim)),
    )


def no_limit(config: RunConfig) -> str:
    return (
        f"{', '.join(config.chosen)} = auto needs batch.memory_limit where no GPU is looked at: "
        "the bytes one rank may use, such as batch.memory_limit=8GiB (for a GPU, about 0.9 of its memory)"
    )


def bias_mistake(config: RunConfig, bias: float | None) -> str:
    """The sigmoid loss needs a bias (SigLIP starts it at -10, the scale at 10); a softmax would cancel one."""
    if config.loss.kind == "sigmoid":
        return (
            f"loss.kind (sigmoid) needs a model with a bias, and {config.model.name} has none: "
            "set model.init_logit_bias=-10 and model.init_logit_scale=2.3026"
        )
    return (
        f"model.init_logit_bias ({bias}): {config.model.name} has a bias, which loss.kind ({config.loss.kind}) would "
        "cancel: set model.init_logit_bias=null, or loss.kind=sigmoid"
    )


def layers_mistake(config: RunConfig) -> str:
    return (
        f"optim.layer_decay ({config.optim.layer_decay}): the layers of {config.model.name} are not numbered as "
        "OpenCLIP's own; set optim.layer_decay=1, or give optim.lr_multipliers by name"
    )


def advice(config: RunConfig, checked: Checked) -> str | None:
    """Where a step computes more than memory may ask for, what to set."""
    plan = checked.plan
    if config.batch.accumulation == "local" or plan.kept_graphs >= plan.accum_steps:
        return None
    if checked.engine.activation_checkpointing:
        return pays_twice(plan)
    if checked.layout is not None:
        return None
    return (
        f"batch.kept_graphs ({plan.kept_graphs} of {plan.accum_steps} micro-batches) computes "
        f"{plan.forwards_per_sample:.2f} forwards per sample: if memory allows it, batch.kept_graphs=all computes "
        "1.00, and batch.kept_graphs=auto keeps as many as fit. The result is the same"
    )


def pays_twice(plan: BatchPlan) -> str:
    """Activation checkpointing and the cache recompute the same forward: together they cost 2.7 forwards."""
    return (
        f"engine.activation_checkpointing with batch.kept_graphs {plan.kept_graphs} of {plan.accum_steps} "
        f"pays for the same forward twice ({plan.forwards_per_sample + RECOMPUTED:.2f} forwards per sample): set "
        "batch.kept_graphs=all, or engine.activation_checkpointing=false with a smaller batch.micro_size, "
        "or auto for both"
    )
