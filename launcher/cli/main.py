"""`clip-train VERB ...`: parse the line, import the verb's module, and end the process with its
exit status.
"""

import argparse
import contextlib
import logging
import os
import pkgutil
import resource
import sys
import traceback
from typing import NoReturn

from clip_train.data.formats import quiet_pillow
from clip_train.errors import RankError, UserError
from clip_train.stop import StopRequest
from clip_train.versions import too_old
from launcher.cli.options import DRY_RUN, VERBS, build_parser
from launcher.runtime.log import Redacting, Unfailing, configure
from launcher.runtime.outcome import Outcome
from launcher.runtime.verdict import OURS, SAFE_PATH, end_process

# What Python, torch and a loader's worker need at least: the limit, its name, the option of ulimit.
LEAST = (
    (resource.RLIMIT_NOFILE, 128, "open files", "-n"),
    (resource.RLIMIT_NPROC, 32, "processes and threads", "-u"),
)


def entry() -> NoReturn:
    """The console script: run `main`, then exit at once, whatever the result.

    All files are closed and the process group is gone by now. Only the teardown of C++ threads
    remains. It sometimes races ("terminate called without an active exception"), and would turn the
    status 0 of a finished run, or 75 of a preempted one, into a crash.
    """
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # otherwise C++ stacks appear whenever another rank ends
    os.environ.setdefault(SAFE_PATH, OURS)  # for fork servers, trackers and compilers
    # multiprocessing's tracker warns after the last message of a rank that ended early; it cleans
    # up all the same
    ignored = ["ignore:resource_tracker", os.environ.get("PYTHONWARNINGS")]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, ignored))
    stderr = sys.stderr.buffer if sys.stderr else open(os.devnull, "wb")  # noqa: SIM115
    sys.stderr = Unfailing(stderr, errors="backslashreplace", line_buffering=True)
    if sys.stdout and sys.argv[1:2] != ["import-args"]:  # its recipe must keep passwords to run
        sys.stdout = Redacting(
            sys.stdout.buffer,
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=bool(sys.stdout.line_buffering),
        )
    stop = StopRequest()
    if sys.argv[1:2] == ["train"]:
        stop.listen()  # before the imports, during which a signal would otherwise kill the rank
    try:
        status = main(stop=stop)
    except SystemExit as e:  # of argparse, which has printed why
        status = e.code if isinstance(e.code, int) else 2
    except KeyboardInterrupt:  # one more Ctrl-C while the final message was written
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    logging.shutdown()
    with contextlib.suppress(OSError):  # the reader closed the pipe
        sys.stdout.flush()
        sys.stderr.flush()
    end_process(status)


def main(argv: list[str] | None = None, stop: StopRequest | None = None) -> int:
    """Run one verb; returns the exit status. SystemExit for a line that cannot be parsed, and after
    --help.
    """
    stop, outcome = stop or StopRequest(), Outcome()
    # launchers of ranks may append --local_rank=N; the environment has it already.
    arguments = [
        a
        for a in (sys.argv[1:] if argv is None else argv)
        if not a.startswith(("--local_rank", "--local-rank"))
    ]
    args = parse(arguments)
    trains = args.verb == "train" and not args.dry_run
    configure(quiet=args.quiet, verbose=args.verbose, trains=trains)
    quiet_pillow()
    args.arguments, args.stop, args.outcome = arguments, stop, outcome
    try:
        for problem in too_old("torch"):
            raise UserError(problem)
        for limit, least, what, option in LEAST:
            allowed, _ = resource.getrlimit(limit)  # -1: any number
            if 0 <= allowed < least:
                raise RankError(
                    f"this shell allows {allowed} {what} (ulimit {option}), and at least {least} "
                    f"are needed: raise it with ulimit {option} 4096, or in "
                    "/etc/security/limits.conf"
                )
        run = DRY_RUN if args.verb == "train" and args.dry_run else VERBS[args.verb].run
        return pkgutil.resolve_name(run)(args)
    except (Exception, KeyboardInterrupt) as e:
        if (
            isinstance(e, BrokenPipeError) and args.verb != "train"
        ):  # the reader of stdout has exited: `... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return outcome.finish(e)
    finally:
        outcome.close()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Like the parser, but overrides may also follow options, where argparse does not look for
    them.
    """
    parser = build_parser()
    more: list[str] = []
    if arguments[:1] == ["submit"] and "--" in arguments:  # what follows is for sbatch
        split = arguments.index("--")
        arguments, more = arguments[:split], arguments[split + 1 :]
    args, left = parser.parse_known_args(arguments)
    args.sbatch_options = more
    overrides = [each for each in left if "=" in each and not each.startswith("-")]
    if len(overrides) < len(left) or (left and not hasattr(args, "overrides")):
        from clip_tools.openclip.flags import suggest

        quote = "; quote the command as one argument"
        hint = quote if args.verb == "import-args" else suggest(left)
        if args.verb == "submit":
            hint += "; options of sbatch go after --, as in -- --qos=high"
        parser.error(f"unrecognized arguments: {' '.join(left)}{hint}")
    if left:
        args.overrides = [*args.overrides, *left]
    return args
