"""`clip-train VERB ...`: the command line, and what each error becomes as an exit status."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from typing import NoReturn

from clip_train.errors import ClipTrainError, RemoteRankError, UserError
from clip_train.stop import StopRequest
from launcher.cli.options import build_parser
from launcher.runtime.error_reports import is_lost_contact, mark_error, said_rank, this_rank
from launcher.runtime.startup import Startup


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
        from launcher.cli.keys import print_keys

        return print_keys()
    # launchers of ranks may append --local_rank=N; the environment says it already.
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
    from launcher.config.recipe import load_config

    try:
        config = load_config(args.recipe, args.overrides)
    except UserError as e:
        if args.verb == "train" and said_rank() is not None:  # the others' recipes may be good
            from launcher.runtime.environment import detect
            from launcher.runtime.rendezvous import refuse

            refuse(detect(os.environ), e)
        raise
    if args.verb == "train":
        from launcher.runtime.launch import launch_local, local_ranks

        ranks = local_ranks(args.ranks, os.environ)
        if ranks > 1:
            return launch_local(config, ranks, arguments, stop or StopRequest())
        from launcher.train import train

        return train(config, stop, startup)
    if args.verb == "submit":
        from launcher.slurm.profile import load_site
        from launcher.slurm.submit import submit

        return submit(config, vars(args), load_site(args.site), dry_run=args.dry_run, offline=args.offline)
    from launcher.cli.plan import print_plan

    return print_plan(config, args.world_size, args.samples_per_second, as_json=args.json)


def _run_without_recipe(args: argparse.Namespace) -> int | None:
    """The verbs that need none, or can do without; None for the others."""
    if args.verb == "demo":
        from launcher.cli.demo import run_demo

        return run_demo(args.data, args.dir, args.overrides)
    if args.verb == "index":
        from launcher.cli.index import run_index

        return run_index(args.shards, caption_key=args.caption_key, workers=args.workers, check=args.check)
    if args.verb == "doctor":
        from launcher.doctor.command import run_doctor

        return run_doctor(args.recipe, args.overrides, as_json=args.json)
    return _run_at_place(args)


def _run_at_place(args: argparse.Namespace) -> int | None:
    """The verbs for which the URL of a run's checkpoints will do; None for the others."""
    if args.verb == "checkpoints":
        from launcher.cli.checkpoints import print_checkpoints

        return print_checkpoints(args.place, args.overrides, verify=args.verify, as_json=args.json)
    if args.verb == "evaluate":
        from launcher.cli.inspect import evaluate_run

        return evaluate_run(args.recipe, args.overrides, args.weights)
    if args.verb == "export":
        from launcher.cli.inspect import export_run

        return export_run(args.recipe, args.overrides, args.output, args.step)
    return None
