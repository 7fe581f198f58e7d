"""The composition root: a checked recipe becomes a running trainer. READ THIS FIRST.

    recipe -> checks -> ranks -> resume? -> engine + weights -> loader -> Trainer.run -> outcome

Each imported module does one of these parts. This module only connects them.
"""

import contextlib
import logging
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clip_train import dist
from clip_train.callbacks import Callback
from clip_train.checkpoint.manager import CheckpointManager
from clip_train.checkpoint.restore import Resumed
from clip_train.data.config import order_keys
from clip_train.data.index import resume_data
from clip_train.data.invalid import InvalidLog
from clip_train.data.loader import Prefetcher, TrainLoader
from clip_train.data.reader import count_missing
from clip_train.data.shared import shared_index
from clip_train.data.tokenizer import Tokenize
from clip_train.engines.base import Engine, MovingAverage
from clip_train.engines.config import describe_sharding
from clip_train.errors import RankError
from clip_train.evaluate.data_sets import evaluation_sets
from clip_train.evaluate.examples import Examples
from clip_train.evaluate.sets import evaluation
from clip_train.memory.plan import RECOMPUTED
from clip_train.metrics.meters import (
    BatchDigest,
    GarbageCollections,
    Profiler,
    Utilization,
)
from clip_train.metrics.nvml import gpu_readings
from clip_train.metrics.own_callbacks import own_callbacks
from clip_train.metrics.process import this_process
from clip_train.metrics.progress import ProgressLine
from clip_train.metrics.sinks import Sinks
from clip_train.metrics.skipped import Skipped
from clip_train.models.clip import build_model, count_parameters, forward_flops
from clip_train.models.freeze import freeze
from clip_train.models.loading import silent
from clip_train.models.weights import initial_weights, resize_of
from clip_train.optim.optimizer import build_optimizer
from clip_train.optim.schedule import learning_rate
from clip_train.places import broken_link
from clip_train.processes import node_name, usable_cores
from clip_train.recipe.memory import choose_layout, memory_limit
from clip_train.recipe.recipe import Recipe
from clip_train.recipe.resolve import Resolved, resolve
from clip_train.recipe.resume import compare_with, optimizer_changed
from clip_train.recipe.teachers import load_teachers
from clip_train.recipe.tokenizer import tokenizer_of
from clip_train.recipe.weights import digest_of_base, weights_here
from clip_train.resizing import AS_CLIP, RESIZED
from clip_train.stop import StopRequest
from clip_train.storage.local import LocalStorage
from clip_train.storage.redact import redact
from clip_train.task import text_lengths
from clip_train.trainer import Trainer
from launcher.runtime import environment, rendezvous
from launcher.runtime.hang import HANG
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.log import LOGGER, log, warn
from launcher.runtime.outcome import Outcome
from launcher.runtime.slow_rank import SlowRank
from launcher.runtime.verdict import ROOM, RUN_DIR, VERDICT_FILE, read_verdict
from launcher.runtime.watchdog import Watchdog, longest_limit
from launcher.slurm.attempts import History


def train(
    config: Recipe, outcome: Outcome, stop: StopRequest, callbacks: Sequence[Callback] = ()
) -> dict[str, float]:
    """Train, on every rank. Returns the numbers of the last evaluation; none: empty.

    Every error is raised. The caller gives it to `outcome.finish`, which writes the message and the
    verdict. stop: already catches signals; its handlers were installed before the slow imports.
    callbacks: those of a program, beside the recipe's.
    """
    env = environment.detect(os.environ)
    environment.check_restarts(config.checkpoint.resume, os.environ, requeues=RUN_DIR in os.environ)
    environment.prepare(os.environ, config.engine.deterministic, config.run_dir / HANG)
    outcome.heartbeat = heartbeat = Heartbeat(env, outcome.publish)
    outcome.watchdog = watchdog = Watchdog(
        config.launch,
        stop,
        heartbeat,
        run_dir=config.run_dir if env.rank == 0 else None,
        hang_dir=config.run_dir / HANG,
    )
    watchdog.end_run = outcome.end
    watchdog.start()
    # Mistakes that a rank can find without the others. Only rank 0 opens the shards.
    resolved = resolve(
        config,
        env.world_size,
        per_node=env.local_world_size,
        read_data=env.rank == 0,
        is_rank=True,
    )
    # a waiting rank must not give up before the watchdog of the hanging rank fires
    collective_seconds = 2 * longest_limit(config.launch.hang_seconds)
    device, workers = environment.take_device(env, config.data.workers)
    if env.rank == 0:
        through = f" through {env.master_addr}:{env.master_port}" if env.world_size > 1 else ""
        versions = {"torch": torch.__version__, **environment.stack(device)}
        log(
            f"{env.describe()}; {device}, {environment.BACKENDS[device.type]}{through}, "
            f"{torch.get_num_threads()} threads; "
            + ", ".join(f"{name} {version}" for name, version in versions.items())
        )
    rendezvous.start(
        env,
        device,
        heartbeat,
        recipe=resolved.config.model_dump(mode="json"),
        rendezvous_seconds=config.launch.rendezvous_seconds,
        group_seconds=config.launch.group_seconds,
        timeout_seconds=collective_seconds,
    )
    # NCCL dumps into the folder without making it
    folder = config.run_dir / HANG if device.type == "cuda" else config.run_dir
    with explain_write_errors(config.run_dir):  # before minutes are spent on loading a model
        dist.on_main(partial(folder.mkdir, parents=True, exist_ok=True))
    # From here on `data.workers` may differ between ranks. All other keys are the same on all.
    resolved = replace(resolved, config=resolved.config.updated(data={"workers": workers}))
    # set by the batch script's controller after an attempt ran out of memory
    activation_bytes = float(os.environ.get(ROOM, "inf"))
    resolved = choose_layout(resolved, memory_limit(resolved, device), activation_bytes)
    outcome.layout = resolved.layout
    trainer = build_trainer(
        resolved,
        env,
        device,
        outcome=outcome,
        stop=stop,
        watchdog=watchdog,
        heartbeat=heartbeat,
        given_callbacks=callbacks,
    )
    rendezvous.set_timeout(collective_seconds)  # also of groups that the engine made
    stop.listen()  # again: a library may have replaced the signal handlers
    metrics = trainer.run()
    outcome.succeed()
    return metrics


@contextlib.contextmanager
def explain_write_errors(run_dir: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a RankError that names the run directory."""
    try:
        yield
    except OSError as e:
        link = broken_link(run_dir.absolute())
        why = f"{link}: mount it" if link else str(e)
        raise RankError(
            f"run.dir ({run_dir}) cannot be written on {node_name()}: {why}; choose another"
        ) from e


def describe_attempt(
    resolved: Resolved, env: environment.RankEnv, device: torch.device
) -> dict[str, Any]:
    """Steps, command, commit, process, hardware, versions, sizes and changed keys of an attempt, for
    its line in attempts.jsonl."""
    config = resolved.recipe  # as the user gave it
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        machine = f"{platform.machine()}, {usable_cores()} cores, {memory:.0f} GiB"
    ranks = "1 rank" if env.world_size == 1 else f"{env.world_size} ranks"
    changed = redact(config.model_dump(mode="json", exclude_defaults=True))
    return {
        "steps": config.steps,
        "command": redact(shlex.join(["clip-train", *sys.argv[1:]])),
        "commit": rendezvous.commit(),
        "process": this_process(),
        "device": device.type,
        "ranks": env.world_size,
        "parameters": count_parameters(resolved.architecture),
        "train_samples": resolved.source.index.num_samples if resolved.source else None,
        "hardware": (
            f"{ranks} on {device.type}, {env.local_world_size} on each host; "
            f"{node_name()}: {machine}"
        ),
        "versions": rendezvous.versions() | environment.stack(device),
        "changed": {
            f"{section}.{key}": value
            for section, keys in changed.items()
            for key, value in keys.items()
        },
    }


def record_attempt(
    resolved: Resolved, start: int, env: environment.RankEnv, device: torch.device
) -> None:
    """Write the recipe as given, and a line in attempts.jsonl: an attempt begins after step
    `start`. On rank 0, once the run directory is known to belong to this recipe."""
    config = resolved.config
    with explain_write_errors(config.run_dir):
        previous = None
        verdict = read_verdict(config.run_dir)
        if verdict is not None:
            word, details = verdict
            previous = [word, details["reason"]]
        History(config.run_dir).append(
            "start",
            step=start,
            previous=previous,
            **describe_attempt(resolved, env, device),
        )
        # In a batch job the controller has removed the old verdict. A file that is here now is
        # from a rank that has just failed.
        if RUN_DIR not in os.environ:
            (config.run_dir / VERDICT_FILE).unlink(missing_ok=True)
        LocalStorage(config.run_dir).put_bytes("recipe.yaml", resolved.recipe.to_yaml().encode())


def build_trainer(
    resolved: Resolved,
    env: environment.RankEnv,
    device: torch.device,
    *,
    outcome: Outcome,
    stop: StopRequest,
    watchdog: Watchdog,
    heartbeat: Heartbeat,
    given_callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Build every part, resume from a checkpoint if there is one, and assemble the trainer."""
    config = resolved.config  # what runs
    architecture = resolved.architecture
    recipe = resolved.recipe  # as given: what a checkpoint stores and a resume compares
    # for random numbers that are not a hash of the sample, such as those of a user's own model
    torch.manual_seed((config.run.seed * 1_000_003 + dist.rank()) % 2**63)
    checkpoints = CheckpointManager(
        config.checkpoint, config.run_dir / "checkpoints", log=log, warn=warn
    )
    checkpoints.preflight()  # an error if the remote store is down
    resumed = checkpoints.resume()
    teachers, teacher = load_teachers(config, device)
    objective = config.loss.build(teachers, config.data.texts_per_image)
    digests = {"teacher": teacher, "init_from": digest_of_base(config)}
    start, notes = 0, []
    if resumed is not None:
        start = resumed.state["step"]
        notes = compare_with(
            recipe, resumed, resolved.plan.world_size, digests, resolved.chosen_values
        )
    checkpoints.begin()  # from here on an older process of this run cannot commit
    dist.on_main(partial(record_attempt, resolved, start, env, device))
    outcome.notify = config.log.notify
    outcome.run_dir = config.run_dir  # from here on the run directory belongs to this recipe
    engine = build_engine(resolved, device)
    if resumed is not None:
        architecture = config.resized(architecture, RESIZED | resumed.state["architecture"])
    if resumed is None or not engine.saves_frozen:  # else the checkpoint has all weights
        log_once = log if dist.is_main() else silent
        with weights_here(config.model, config.storage) as model:
            weights = initial_weights(model, config.run.seed, log_once)
            engine.load_fragments(weights, {})
            if resumed is None:
                trained = dist.agreed(resize_of, model, log_once)
                architecture = config.resized(architecture, trained)
    if resolved.layout is not None and dist.is_main():
        log(f"{', '.join(recipe.chosen)} = auto: {resolved.layout.describe()}")
    tokenizer = tokenizer_of(architecture)
    loader = build_loader(resolved, device, tokenizer, resumed)
    skipped = Skipped(warn, start)
    sinks = Sinks(
        config.log,
        config.run_dir,
        resume_step=start,
        recipe=recipe.to_keep(),
        skipped=skipped,
    )
    examples = Examples(config.run_dir, start, skipped)
    progress = progress_line(config, start)
    flops_of_forward = partial(
        forward_flops,
        architecture,
        architecture.vision_cfg.patch_dropout,
        config.data.num_texts,
    )
    callbacks: list[Callback] = [
        watchdog,
        InvalidLog(loader.epoch, log if progress else silent, sinks.write),
    ]
    if config.log.batch_digest:
        callbacks.append(BatchDigest())
    if dist.is_main():
        recomputed = RECOMPUTED[config.engine.recompute]
        callbacks.append(Utilization(flops_of_forward, device, skipped, recomputed))
        callbacks += gpu_readings(environment.gpu_identity(device))
    if env.world_size > 1:
        callbacks.append(SlowRank(heartbeat))
    profiled_steps = config.log.profile_steps
    if profiled_steps and max(profiled_steps) > start:
        first, last = min(profiled_steps), max(profiled_steps)
        callbacks.append(Profiler(first, last, start, config.run_dir / "profile", skipped))
    callbacks += own_callbacks(config.log, skipped, given_callbacks)
    callbacks += [sinks, examples, *progress, GarbageCollections()]
    trainer = Trainer(
        engine=engine,
        objective=objective,
        batches=Prefetcher(loader, device, asked_to_stop=stop.asked),
        plan=resolved.plan,
        sizes=config.batch.sizes,
        steps=config.steps,
        learning_rate=partial(learning_rate, config.schedule, config.optim.lr, steps=config.steps),
        checkpoints=checkpoints,
        callbacks=callbacks,
        stop=stop,
        evaluate=evaluation(
            config,
            architecture,
            engine,
            tokenizer,
            sets=dist.on_main(evaluation_sets, config),
            examples=examples,
            asked_to_stop=stop.asked,
        ),
        evaluate_every=config.evaluate.every_steps,
        log=log,
        run_state={
            "recipe": recipe.to_keep(),
            "chosen_values": resolved.chosen_values,
            # an export reads it, because the recipe's files may be gone by then
            "architecture": architecture.model_dump(mode="json"),
            **digests,
            **(loader.state() if dist.is_main() else {}),  # only rank 0 writes it
        },
        skipped=skipped,
    )
    outcome.trainer = trainer
    watchdog.watch(trainer)
    if resumed is not None:
        trainer.resume(resumed, new_optimizer=optimizer_changed(config, resumed))
    if dist.is_main():
        describe_start(replace(resolved, architecture=architecture), engine, resumed, notes)
    return trainer


def build_engine(resolved: Resolved, device: torch.device) -> Engine:
    """Collective: the engine around the recipe's model, with weights that nobody has set yet."""
    config = resolved.config

    def make_model() -> torch.nn.Module:
        model = build_model(
            resolved.architecture,
            dropout=config.model.dropout,
            activation_checkpointing=config.engine.recompute,
        )
        freeze(model, config.model)
        return model

    # OpenCLIP's towers are looked at once, outside of an engine's own way to construct
    count_parameters(resolved.architecture)
    engine = config.engine.build(
        make_model,
        partial(build_optimizer, config.optim, offloaded=config.engine.offload == "optimizer"),
        device=device,
        grad_clip_norm=config.optim.grad_clip_norm,
        micro_size=resolved.plan.micro_size,
    )
    if config.optim.ema_decay is not None:
        engine.ema = MovingAverage(config.optim.ema_decay, config.optim.ema_warmup)
    engine.saves_frozen = resolved.architecture.lora is None
    return engine


def build_loader(
    resolved: Resolved,
    device: torch.device,
    tokenizer: Tokenize,
    resumed: Resumed | None,
) -> TrainLoader:
    """Collective: the loader, at the first step or at the checkpoint's."""
    config = resolved.config
    known_index = resolved.source.index if resolved.source else None
    index = shared_index(
        "data.train",
        config.data.train,
        config.data.verify,
        config.storage,
        known_index,
        config.data.kept,
    )
    order_start, sizes = 0, config.batch.sizes
    if resumed is not None:
        data = resume_data(
            resumed.state,
            index,
            order_keys(config.data, sizes, config.run.seed, index),
            allow_changed_shards=config.data.allow_changed_shards,
            allow_changed_order=config.checkpoint.allow_changed_recipe,
        )
        index, order_start = data.index, data.order_start
        if data.notice and dist.is_main():
            warn(f"the data starts over at step {order_start}, as the recipe allows: {data.notice}")
    index = count_missing(index, config.storage, log=log)
    text = resolved.architecture.text_cfg
    return dist.agreed(
        TrainLoader,
        config.data,
        image_size=resolved.architecture.vision_cfg.image_size,
        context_length=text.context_length,
        global_size=sizes,
        seed=config.run.seed,
        rank=dist.rank(),
        world_size=dist.world_size(),
        step=resumed.step if resumed else 0,
        order_start=order_start,
        index=index,
        pin_memory=device.type == "cuda",
        storage=config.storage,
        tokenizer=tokenizer,
        lengths=text_lengths if resolved.texts_end else None,
        pack_texts=resolved.padded_because is None,
        groups=config.loss.groups,
        patches=resolved.architecture.patches,
    )


def progress_line(config: Recipe, start: int) -> list[Callback]:
    """The progress bar of rank 0, unless the recipe or `--quiet` turns it off."""
    if dist.is_main() and config.log.progress and LOGGER.isEnabledFor(logging.INFO):
        return [ProgressLine(config.steps, start_step=start)]
    return []


def describe_start(
    resolved: Resolved,
    engine: Engine,
    resumed: Resumed | None,
    notes: list[str],
) -> None:
    """Log the plan of this run on rank 0. Write resolved.yaml and the engine's files.

    notes: the differences between the recipe and the checkpoint's, in words.
    """
    config, plan = resolved.config, resolved.plan
    with explain_write_errors(config.run_dir):
        for name, text in {"resolved.yaml": config.to_yaml(), **engine.files}.items():
            LocalStorage(config.run_dir).put_bytes(name, text.encode())
    scheduled = f"{config.batch.sizes}; the largest, " if config.batch.schedule else ""
    log(
        f"{config.model.name}: global batch {scheduled}{plan.global_size} = "
        f"{plan.world_size} ranks x {plan.accum_steps} micro-batches of {plan.micro_size}, "
        f"{plan.kept_graphs} graphs kept; "
        f"{describe_sharding(config.engine.model_dump())}, "
        f"{config.engine.precision}, {engine.device.type}; {config.data.lanes} streams; "
        f"{config.steps} steps into {config.run_dir}"
    )
    if resolved.source is not None:
        log(f"data.train: {resolved.source.index.describe()}")
    for note in (*resolved.notes(), *resolved.architecture.notes, *engine.notes):
        log(f"note: {note}")
    resize = resolved.architecture.resize
    if resize != AS_CLIP:
        log(
            f"note: evaluation resizes images by {resize.resize_mode}, {resize.interpolation} "
            "(data.resize)"
        )
    if resize.resize_mode == "squash" and not config.data.aug_relative_ratio:
        log(
            "note: training crops images to data.aug_ratio, as OpenCLIP does, and the model was "
            "trained on squashed ones: data.aug_relative_ratio=true squashes here, too"
        )
    if config.engine.pack_texts and resolved.padded_because is not None:
        log(f"note: texts are computed with their padding: {resolved.padded_because}")
    if resumed is not None:
        log("\n".join([resumed.describe(), *notes]))
