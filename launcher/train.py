"""The composition root: a checked recipe becomes a running trainer. READ THIS FIRST.

    recipe -> checks -> ranks -> resume? -> engine + weights -> loader -> Trainer.run -> outcome

Every module below knows only its own part, and this one computes nothing.
"""

import contextlib
import importlib
import logging
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clip_train import dist
from clip_train.callbacks import Callback
from clip_train.checkpoint.manager import CheckpointManager
from clip_train.checkpoint.restore import Resumed
from clip_train.data.invalid import InvalidLog
from clip_train.data.loader import Prefetcher
from clip_train.engine import Engine
from clip_train.errors import RankError
from clip_train.metrics.meters import (
    BatchDigest,
    GarbageCollections,
    Profiler,
    Utilization,
    record_memory,
)
from clip_train.metrics.own_callbacks import own_callbacks
from clip_train.metrics.progress import ProgressLine
from clip_train.metrics.sinks import Sinks
from clip_train.metrics.skipped import Skipped
from clip_train.models.clip import flops_per_sample
from clip_train.models.weights import initial_weights, silent
from clip_train.optim.schedule import learning_rate
from clip_train.stop import StopRequest
from clip_train.storage.local import LocalStorage
from clip_train.storage.redact import redact
from clip_train.trainer import Trainer
from launcher import components, engines
from launcher.config.memory import choose_layout, memory_limit
from launcher.config.recipe import RunConfig
from launcher.config.resolve import Resolved, resolve
from launcher.config.resume import compare_with
from launcher.runtime import environment as ranks
from launcher.runtime import rendezvous
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.log import LOGGER, log, warn
from launcher.runtime.outcome import Outcome
from launcher.runtime.slow_rank import SlowRank
from launcher.runtime.verdict import ROOM, RUN_DIR, VERDICT_FILE, node_name, read_verdict
from launcher.runtime.watchdog import Watchdog
from launcher.slurm.attempts import History
from launcher.weights import weights_here


def train(config: RunConfig, outcome: Outcome, stop: StopRequest) -> int:
    """The `train` verb, on every rank. Returns the exit status 0. Any error is raised, and the
    caller passes it to `outcome.finish`.

    stop: its signal handlers were installed before the imports.
    """
    env = ranks.detect(os.environ)
    ranks.prepare(os.environ, config.engine.deterministic)
    outcome.heartbeat = heartbeat = Heartbeat(env, outcome.publish)
    outcome.watchdog = watchdog = Watchdog(
        config.launch,
        stop,
        heartbeat,
        run_dir=config.run_dir if env.rank == 0 else None,
    )
    watchdog.start()
    kind = engines.on_this_machine(config.engine, env.world_size).kind
    importlib.import_module(engines.find_engine(kind).module)
    # mistakes that a single rank can find; only rank 0 opens the shards
    resolved = resolve(
        config,
        env.world_size,
        per_node=env.local_world_size,
        read_data=env.rank == 0,
        is_rank=True,
    )
    device, workers = ranks.take_device(env, config.data.workers)
    if env.rank == 0:
        through = f" through {env.master_addr}:{env.master_port}" if env.world_size > 1 else ""
        log(
            f"{env.describe()}; {device}, {ranks.BACKENDS[device.type]}{through}, "
            f"{torch.get_num_threads()} threads; torch {torch.__version__}"
            f"{''.join(f', {name} {found}' for name, found in ranks.stack(device).items())}"
        )
    rendezvous.start(
        env,
        device,
        heartbeat,
        recipe=resolved.config.model_dump(mode="json"),
        rendezvous_seconds=config.launch.rendezvous_seconds,
        group_seconds=config.launch.group_seconds,
        # a waiting rank must not give up before the watchdog of the hanging rank fires
        timeout_seconds=2 * config.launch.longest_limit,
    )
    with writing(config.run_dir):  # now rather than after a model has been loaded
        dist.on_main(partial(config.run_dir.mkdir, parents=True, exist_ok=True))
    # not the same on all ranks, as all other keys are
    resolved = replace(resolved, config=resolved.config.updated(data={"workers": workers}))
    resolved = choose_layout(
        resolved, memory_limit(resolved, device), float(os.environ.get(ROOM, "inf"))
    )
    outcome.layout = resolved.layout
    trainer = build_trainer(resolved, env, device, outcome, stop, watchdog, heartbeat)
    rendezvous.set_timeout(2 * config.launch.longest_limit)  # of the engine's groups too
    stop.listen()  # again: a library may have taken the signals over
    trainer.run()
    outcome.succeed()
    return 0


@contextlib.contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """RankError where the run directory cannot be written."""
    try:
        yield
    except OSError as e:
        raise RankError(
            f"run.dir ({run_dir}) cannot be written on {node_name()}: {e}; choose another"
        ) from e


def facts(config: RunConfig, env: ranks.RankEnv, device: torch.device) -> dict[str, Any]:
    """The facts of an attempt for its line in attempts.jsonl. config: as the user gave it."""
    if device.type == "cuda":
        what = torch.cuda.get_device_name(device)
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        what = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
    W = env.world_size
    size = f"{W} rank{'s' * (W > 1)} on {device.type}, {env.local_world_size} on each host"
    differing = redact(config.model_dump(mode="json", exclude_defaults=True)).items()
    return {
        "steps": config.steps,
        "command": redact(shlex.join(["clip-train", *sys.argv[1:]])),
        "commit": rendezvous.commit(),
        "hardware": f"{size}; {node_name()}: {what}",
        "versions": rendezvous.versions() | ranks.stack(device),
        "changed": {
            f"{section}.{key}": value for section, keys in differing for key, value in keys.items()
        },
    }


def describe_run_dir(
    resolved: Resolved, start: int, env: ranks.RankEnv, device: torch.device
) -> None:
    """On rank 0, once the run directory is known to belong to this recipe: write the recipe as
    given, and that an attempt begins after step `start`."""
    config = resolved.config
    with writing(config.run_dir):
        before = read_verdict(config.run_dir)
        History(config.run_dir).append(
            "start",
            step=start,
            previous=[before[0], before[1]["reason"]] if before else None,
            **facts(resolved.recipe, env, device),
        )
        # in a batch job the controller has removed the old verdict; a rank may have a new one
        if RUN_DIR not in os.environ:
            (config.run_dir / VERDICT_FILE).unlink(missing_ok=True)
        LocalStorage(config.run_dir).put_bytes("recipe.yaml", resolved.recipe.to_yaml().encode())


def build_trainer(
    resolved: Resolved,
    env: ranks.RankEnv,
    device: torch.device,
    outcome: Outcome,
    stop: StopRequest,
    watchdog: Watchdog,
    heartbeat: Heartbeat,
) -> Trainer:
    """Build every part, resume from a checkpoint if there is one, and assemble the trainer."""
    config = resolved.config
    steps, sizes = config.steps, config.batch.sizes
    recipe = resolved.kept
    torch.manual_seed(
        (config.run.seed * 1_000_003 + dist.rank()) % 2**63
    )  # random numbers other than counter-based draws
    checkpoints = CheckpointManager(
        config.checkpoint, config.run_dir / "checkpoints", log=log, warn=warn
    )
    checkpoints.preflight()  # an error if the remote store is down
    resumed = checkpoints.resume()
    objective, teacher = components.build_objective(config, device)
    digests = {"teacher": teacher, "init_from": components.base_of(config)}
    notes = (
        [] if resumed is None else compare_with(recipe, resumed, resolved.plan.world_size, digests)
    )
    checkpoints.begin()  # from here on an older process of this run cannot commit
    start = resumed.state["step"] if resumed else 0
    dist.on_main(partial(describe_run_dir, resolved, start, env, device))
    outcome.notify = config.log.notify
    outcome.run_dir = config.run_dir  # from here on the run directory belongs to this recipe
    engine = components.build_engine(resolved, device)
    if resumed is None or not engine.saves_frozen:
        say = log if dist.is_main() else silent
        with weights_here(config.model, config.storage) as model:
            engine.load_fragments(
                dist.agreed(partial(initial_weights, model, config.run.seed, say)), {}
            )
    if resolved.layout is not None and dist.is_main():
        log(f"{', '.join(recipe.chosen)} = auto: {resolved.layout.describe()}")
    index = components.shared_index(
        config, "data.train", config.data.train, resolved.source.index if resolved.source else None
    )
    loader = components.build_loader(resolved, device, resumed, index)
    skipped = Skipped(warn, start)
    sinks = dist.agreed(
        Sinks,
        config.log,
        config.run_dir,
        resume_step=start,
        recipe=recipe.to_keep(),
        skipped=skipped,
    )
    progress: list[Callback] = []
    if dist.is_main() and config.log.progress and LOGGER.isEnabledFor(logging.INFO):
        progress = [ProgressLine(steps, start_step=start)]
    if config.log.memory_snapshot and device.type == "cuda":
        record_memory(config.run_dir / "memory" / f"rank{env.rank}.pickle", skipped)
    architecture, traced = resolved.architecture, sorted(config.log.profile_steps or [0])
    forward_flops = partial(
        flops_per_sample,
        architecture,
        architecture.vision_cfg.patch_dropout,
        config.data.num_texts,
    )
    callbacks: list[Callback] = [
        watchdog,
        InvalidLog(loader.epoch, log if progress else silent, sinks.write),
        *([BatchDigest()] if config.log.batch_digest else []),
        *([Utilization(forward_flops, device, skipped)] if dist.is_main() else []),
        *([SlowRank(heartbeat)] if env.world_size > 1 else []),
        *(
            [Profiler(traced[0], traced[-1], start, config.run_dir / "profile", skipped)]
            if traced[-1] > start
            else []
        ),
        *dist.agreed(own_callbacks, config.log, skipped),
        sinks,
        *progress,
        GarbageCollections(),
    ]
    trainer = Trainer(
        engine=engine,
        objective=objective,
        batches=Prefetcher(loader, device),
        plan=resolved.plan,
        sizes=sizes,
        steps=steps,
        learning_rate=partial(learning_rate, config.schedule, config.optim.lr, steps=steps),
        checkpoints=checkpoints,
        callbacks=callbacks,
        stop=stop,
        evaluate=components.evaluation(config, resolved.architecture, engine),
        evaluate_every=config.evaluate.every_steps,
        log=log,
        run_state={
            "recipe": recipe.to_keep(),
            # for an export without the recipe's files
            "architecture": resolved.architecture.model_dump(mode="json"),
            **digests,
            **(loader.state() if dist.is_main() else {}),  # only rank 0 writes it
        },
        skipped=skipped,
    )
    outcome.trainer = trainer
    watchdog.committed = lambda: checkpoints.last_good.step if checkpoints.last_good else None
    if resumed is not None:
        trainer.resume(resumed)
    if dist.is_main():
        describe_start(resolved, engine, resumed, notes)
    return trainer


def describe_start(
    resolved: Resolved,
    engine: Engine,
    resumed: Resumed | None,
    notes: list[str],
) -> None:
    """Log the plan of this run on rank 0, and write it as resolved.yaml beside the engine's
    files."""
    config, plan = resolved.config, resolved.plan
    with writing(config.run_dir):
        for name, text in {"resolved.yaml": config.to_yaml(), **engine.files}.items():
            LocalStorage(config.run_dir).put_bytes(name, text.encode())
    varying = f"{config.batch.sizes}; the largest, " if config.batch.schedule else ""
    log(
        f"{config.model.name}: global batch {varying}{plan.global_size} = {plan.world_size} ranks "
        f"x {plan.accum_steps} micro-batches of {plan.micro_size}, {plan.kept_graphs} graphs kept; "
        f"{engines.describe(config.engine)}, "
        f"{config.engine.precision}, {engine.device.type}; {config.data.lanes} streams; "
        f"{config.steps} steps into {config.run_dir}"
    )
    if resolved.source is not None:
        log(f"data.train: {resolved.source.index.describe()}")
    for note in (*resolved.architecture.notes, *engine.notes):
        log(f"note: {note}")
    if config.engine.pack_texts and resolved.padded_because is not None:
        log(f"note: texts are computed with their padding: {resolved.padded_because}")
    if resumed is not None:
        log("\n".join([resumed.describe(), *notes]))
