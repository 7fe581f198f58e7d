"""`clip-train VERB ...`: the command line, and what each error becomes as an exit status."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import textwrap
from typing import NoReturn

from clip_train import __version__
from clip_train.errors import ClipTrainError, RemoteRankError, UserError
from clip_train.stop import StopRequest
from launcher.marks import is_lost_contact, mark_error, said_rank, this_rank
from launcher.startup import Startup

EPILOG = """\
exit status: 0 done; 75 preempted after a commit (run the same line again); 2 a mistake in the recipe
or the command; 1 anything else.

examples:
  clip-train demo                                        train on captioned shapes, 4 minutes on a laptop
  clip-train train recipes/vit_b32.yaml optim.lr=1e-3    all GPUs of this machine; resumes by itself when run again
  torchrun --nproc-per-node 8 -m launcher train recipes/vit_b32.yaml engine.precision=bf16
  clip-train index 's3://bucket/cc12m/{00000..01242}.tar'   once, before training from shards
  clip-train plan recipes/vit_b32.yaml --world-size 64   batch arithmetic and memory, before a job is submitted
"""

RECIPE_HELP = "a recipe (YAML); examples lie in recipes/"
OVERRIDE_HELP = "overrides of the recipe, such as batch.global_size=4096 optim.lr=1e-3"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clip-train",
        description="Train CLIP so that the result depends on the global batch alone, not on how it is computed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"clip-train {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def add(
        verb: str, help: str, description: str, recipe: bool = True, place: bool = False
    ) -> argparse.ArgumentParser:
        sub = verbs.add_parser(
            verb,
            help=help,
            description=textwrap.dedent(description),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if recipe:
            sub.add_argument("recipe", help=RECIPE_HELP)
        if place:
            sub.add_argument("place", metavar="PLACE", help="a recipe, a run's folder, or a URL of checkpoints")
        sub.add_argument("overrides", nargs="*", metavar="key.path=value", help=OVERRIDE_HELP)
        return sub

    train = add(
        "train",
        "train, or go on training",
        """\
        Train the recipe; if its run directory has a checkpoint, go on from the newest complete one.
        Under torchrun, the deepspeed launcher or srun, every rank runs this same line.""",
    )
    train.add_argument(
        "--ranks", type=int, help="without a launcher: ranks on this machine (default: one for each GPU, else 1)"
    )
    train.add_argument("--keys", action="store_true", help="print every key of a recipe with its default, and exit")

    plan = add(
        "plan",
        "batch arithmetic, memory and length, without a GPU",
        "Print what a run would do; touches no GPU.",
    )
    plan.add_argument("--world-size", type=int, help="ranks (default: WORLD_SIZE, else 1)")
    plan.add_argument(
        "--samples-per-second",
        type=float,
        help="over all ranks, for the ETA (default: from the run's metrics)",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")

    submit = add(
        "submit",
        "render, check and submit a SLURM job",
        """\
        Check everything that would fail after hours in the queue, freeze recipe and code beside the batch script,
        and hand it to sbatch. The job requeues itself until it is done, or gives up: docs/slurm.md.""",
    )
    submit.add_argument("--nodes", type=int, help="(default: of the site file, else 1)")
    submit.add_argument("--gpus-per-node", type=int, help="each with a rank (default: of the site file, else 8)")
    submit.add_argument("--tasks-per-node", type=int, help="ranks per node, where --gpus-per-node is 0")
    submit.add_argument("--cpus-per-task", type=int, help="cores per rank (default: of the site file, else 8)")
    submit.add_argument("--time", help="limit of one attempt, such as 24:00:00")
    submit.add_argument("--partition")
    submit.add_argument("--account")
    submit.add_argument("--qos")
    submit.add_argument(
        "--template",
        choices=["single", "train", "chain", "torchrun"],
        help="of slurm/ (default: single or train, by --nodes); chain: where jobs may not requeue",
    )
    submit.add_argument("--site", help="YAML of defaults (default: $CLIP_TRAIN_SITE, ~/.config/clip-train/site.yaml)")
    submit.add_argument("--dry-run", action="store_true", help="check, print the batch script, and submit nothing")
    submit.add_argument("--offline", action="store_true", help="look neither at shards nor at checkpoint.remote")

    doctor = add(
        "doctor",
        "check this machine, the recipe and the cluster",
        "One line for each thing that can go wrong: ok, warning or error, with the remedy. Status 1 with an error.",
        recipe=False,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")

    evaluate = add(
        "evaluate",
        "zero-shot and retrieval of a run's checkpoint",
        """\
        Evaluate a checkpoint on data.val. Instead of the recipe a run's folder will do, or the URL of a run's
        checkpoints: then the recipe is the one in the checkpoint.""",
    )
    evaluate.add_argument(
        "--weights", help="an exported folder or a weights file instead of the run's newest checkpoint"
    )

    export = add(
        "export",
        "weights for OpenCLIP, as safetensors",
        """\
        Write a folder that open_clip loads, without a GPU. Instead of the recipe a run's folder will do, or the URL
        of a run's checkpoints: then none of the run's files are needed.""",
    )
    export.add_argument("--output", help="folder to write (default: <run.dir>/export)")
    export.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")

    index = verbs.add_parser(
        "index",
        help="count and checksum shards, so that epochs are exact and damage is seen",
        description="Read shards once and write sizes.json and clip_train_index.json beside them, on disk or on S3.",
    )
    index.add_argument("shards", nargs="+", metavar="SHARDS", help="as data.train: paths, URLs, braces, globs")
    index.add_argument("--caption-key", help="as data.caption_key: count samples with this key in their .json")
    index.add_argument("--workers", type=int, help="processes (default: one for each CPU, 2 to 16)")
    index.add_argument("--check", action="store_true", help="read again and compare with the index; write nothing")

    checkpoints = add(
        "checkpoints",
        "what checkpoints there are, whole or not, and which will stay",
        """\
        List the checkpoints of a run, on its disk and in checkpoint.remote. PLACE is a recipe, a run's folder, or a URL
        or folder of checkpoints. Exit status 1 where a committed one is not whole.""",
        recipe=False,
        place=True,
    )
    checkpoints.add_argument("--verify", action="store_true", help="read every byte and compare it with its sha256")
    checkpoints.add_argument("--json", action="store_true", help="print JSON")

    demo = add(
        "demo",
        "train a small CLIP in minutes and see it work",
        """\
        Build a small data set, train on it with micro-batches and the feature cache, and evaluate zero-shot.
        shapes: captioned drawings, tested on colour-shape-size-background combinations never seen in training.
        digits: the real handwritten digits of scikit-learn.""",
        recipe=False,
    )
    demo.add_argument("--data", choices=["shapes", "digits"], default="shapes")
    demo.add_argument("--dir", default="runs", help="where data and runs go (default: runs)")
    return parser


def entry() -> NoReturn:
    """The console script: `main`, and then out at once.

    All files are closed and the process group is gone by now. What is left is the teardown of C++ threads,
    which races at times ("terminate called without an active exception") and would turn a finished run's
    status 0, or a preempted one's 75, into a crash.
    """
    stop = StopRequest()
    if sys.argv[1:2] == ["train"]:
        stop.listen()  # before the imports, during which a signal would otherwise kill the rank
    status = main(stop=stop)
    logging.shutdown()
    with contextlib.suppress(OSError):  # a reader that has gone away
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def main(argv: list[str] | None = None, stop: StopRequest | None = None) -> int:
    """Run one verb; returns the exit status. Messages for the user go to stderr, without a traceback."""
    startup = Startup()
    startup.done("python")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"] and "--keys" in arguments:
        from launcher.show import print_keys

        return print_keys()
    # torch's and DeepSpeed's own launchers may append --local_rank=N; the environment says it already.
    arguments = [a for a in arguments if not a.startswith(("--local_rank", "--local-rank"))]
    args = parse(arguments)
    try:
        return _run(args, arguments, stop, startup)
    except ClipTrainError as e:
        mark_error(e)
        # Once for all ranks: rank 0 prints what all raise together, else the failing rank prints its own.
        if not (isinstance(e, RemoteRankError) or e.told) and (not e.everywhere or this_rank() == 0):
            _say(f"error: {e}")
        return e.exit_status
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except Exception as e:
        mark_error(e)
        if not is_lost_contact(e):
            raise
        _say(f"error: lost contact with another rank, which has its own message: {' '.join(str(e).split())[:300]}")
        return 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """As the parser has it; overrides may also stand behind options, where argparse looks for none."""
    parser = build_parser()
    args, left = parser.parse_known_args(arguments)
    overrides = [each for each in left if "=" in each and not each.startswith("-")]
    if len(overrides) < len(left) or (left and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        args.overrides = [*args.overrides, *left]
    return args


def _say(message: str) -> None:
    rank = said_rank()
    print(f"clip-train: {'' if rank is None else f'[rank {rank}] '}{message}", file=sys.stderr, flush=True)


def _run(args: argparse.Namespace, arguments: list[str], stop: StopRequest | None, startup: Startup) -> int:
    status = _run_without_recipe(args)
    if status is not None:
        return status
    from launcher.config import load_config

    try:
        config = load_config(args.recipe, args.overrides)
    except UserError as e:
        if args.verb == "train" and said_rank() is not None:  # the others' recipes may be good
            from launcher.env import detect
            from launcher.meeting import refuse

            refuse(detect(os.environ), e)
        raise
    if args.verb == "train":
        from launcher.local import launch_local, local_ranks

        ranks = local_ranks(args.ranks, os.environ)
        if ranks > 1:
            return launch_local(config, ranks, arguments, stop or StopRequest())
        from launcher.train import train

        return train(config, stop, startup)
    if args.verb == "submit":
        from launcher.site import load_site
        from launcher.submit import submit

        return submit(config, vars(args), load_site(args.site), dry_run=args.dry_run, offline=args.offline)
    from launcher.plan import print_plan

    return print_plan(config, args.world_size, args.samples_per_second, as_json=args.json)


def _run_without_recipe(args: argparse.Namespace) -> int | None:
    """The verbs that need none, or can do without; None for the others."""
    if args.verb == "demo":
        from launcher.demo import run_demo

        return run_demo(args.data, args.dir, args.overrides)
    if args.verb == "index":
        from launcher.index import run_index

        return run_index(args.shards, caption_key=args.caption_key, workers=args.workers, check=args.check)
    if args.verb == "doctor":
        from launcher.doctor import run_doctor

        return run_doctor(args.overrides, as_json=args.json)
    return _run_at_place(args)


def _run_at_place(args: argparse.Namespace) -> int | None:
    """The verbs for which the URL of a run's checkpoints will do; None for the others."""
    if args.verb == "checkpoints":
        from launcher.checkpoints import print_checkpoints

        return print_checkpoints(args.place, args.overrides, verify=args.verify, as_json=args.json)
    if args.verb == "evaluate":
        from launcher.inspect_run import evaluate_run

        return evaluate_run(args.recipe, args.overrides, args.weights)
    if args.verb == "export":
        from launcher.inspect_run import export_run

        return export_run(args.recipe, args.overrides, args.output, args.step)
    return None
