"""`clip-train VERB ...`: import the verb's module, parse the line, and end the process with the
verb's exit status.

A verb is a module of `VERBS`: `add_arguments(parser)` declares its arguments, and `run` gets them by
name. `run` imports what takes long, so `--help` and mistakes in arguments are answered at once.
"""

import argparse
import contextlib
import importlib
import inspect
import logging
import os
import resource
import sys
import traceback
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from clip_train import __version__
from clip_train.data.formats import quiet_pillow
from clip_train.errors import RankError, UserError
from clip_train.stop import StopRequest
from clip_train.versions import too_old
from launcher.cli.process import Process
from launcher.runtime.log import Redacting, Unfailing, configure
from launcher.runtime.outcome import Outcome
from launcher.runtime.verdict import OURS, SAFE_PATH, end_process


@dataclass(frozen=True)
class Verb:
    module: str  # with `add_arguments` and `run`
    help: str  # one line of `clip-train --help`

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


VERBS = {
    "train": Verb("launcher.cli.train", "train, or resume training"),
    "keys": Verb("clip_tools.verbs.keys", "every key that a recipe can hold"),
    "plan": Verb("clip_tools.verbs.plan", "batch arithmetic, memory and length, without a GPU"),
    "submit": Verb("launcher.cli.submit", "render, check and submit a SLURM job"),
    "doctor": Verb("clip_tools.verbs.doctor", "check this machine, the recipe and the cluster"),
    "evaluate": Verb(
        "clip_tools.verbs.evaluate",
        "zero-shot, retrieval and validation loss of a run or of any weights",
    ),
    "embed": Verb("clip_tools.verbs.embed", "the features of a data set, as .npy files"),
    "mine": Verb("clip_tools.verbs.mine", "shards with hard negatives, from the features of embed"),
    "reinforce": Verb(
        "clip_tools.verbs.reinforce",
        "shards with teachers' features, augmentations and synthetic captions",
    ),
    "caption": Verb("clip_tools.verbs.caption", "captions of the images in a folder, by a CoCa"),
    "export": Verb(
        "clip_tools.verbs.export", "weights for OpenCLIP or transformers, as safetensors"
    ),
    "branch": Verb(
        "clip_tools.verbs.branch",
        "a new run that starts from another run's checkpoint and cools down",
    ),
    "average": Verb("clip_tools.verbs.average", "the mean of checkpoints' weights, as an export"),
    "shards": Verb(
        "clip_tools.verbs.shards", "a table or a folder of images with captions as shards"
    ),
    "index": Verb(
        "clip_tools.verbs.index",
        "count and checksum shards, so that epochs are exact and damage is seen",
    ),
    "checkpoints": Verb(
        "clip_tools.verbs.checkpoints", "list checkpoints, their state, and which will be kept"
    ),
    "report": Verb("clip_tools.verbs.report", "write an HTML report of a run"),
    "watch": Verb("clip_tools.verbs.watch", "runs in the terminal, live"),
    "import-args": Verb("clip_tools.verbs.import_args", "an OpenCLIP command line as a recipe"),
    "demo": Verb("clip_tools.verbs.demo", "train a small CLIP in minutes and see it work"),
    "completion": Verb("clip_tools.verbs.completion", "shell completion for this command"),
}

OF_EVERY_VERB = ("verb", "quiet", "verbose")  # arguments that this module uses itself

EPILOG = """\
exit status: 0 done; 75 preempted after a commit (run the same line again); 130 interrupted twice;
2 a mistake in the recipe or the command; 1 anything else.

examples:
  clip-train demo                                        train on captioned shapes, 4 minutes
  clip-train train recipes/vit_b32.yaml optim.lr=1e-3    all GPUs; the same line again resumes
  torchrun --nproc-per-node 8 -m launcher train recipes/vit_b32.yaml engine.precision=bf16
  clip-train index 's3://bucket/cc12m/{00000..01242}.tar'   once, before training from shards
  clip-train plan recipes/vit_b32.yaml --world-size 64   batch arithmetic and memory
"""

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
    verb = arguments[0] if arguments else ""
    configure(trains=verb == "train")  # until the line is parsed
    try:
        args = parse(arguments)
        trains = verb == "train" and not args.dry_run
        configure(quiet=args.quiet, verbose=args.verbose, trains=trains)
        quiet_pillow()
        check_machine()  # before `run` imports torch
        run = VERBS[verb].load().run
        if hasattr(args, "overrides"):  # it takes a recipe
            from launcher.cli.client import choose_client

            choose_client(args)
        named = {key: value for key, value in vars(args).items() if key not in OF_EVERY_VERB}
        if "process" in inspect.signature(run).parameters:
            named["process"] = Process(arguments, stop, outcome, args.quiet)
        return run(**named)
    except (Exception, KeyboardInterrupt) as e:
        if (
            isinstance(e, BrokenPipeError) and verb != "train"
        ):  # the reader of stdout has exited: `... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return outcome.finish(e)
    finally:
        outcome.close()


def check_machine() -> None:
    """UserError for a torch that is too old; RankError if the shell allows too few files or
    processes."""
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


# -- the command line


def parse(arguments: list[str]) -> argparse.Namespace:
    """Like the parser, but overrides may also follow options, where argparse does not look for
    them.
    """
    verb = arguments[0] if arguments else ""
    parser = build_parser(verb)
    sbatch_options: list[str] = []
    if verb == "submit" and "--" in arguments:  # what follows is for sbatch
        split = arguments.index("--")
        arguments, sbatch_options = arguments[:split], arguments[split + 1 :]
    args, left = parser.parse_known_args(arguments)
    if verb == "submit":
        args.sbatch_options = sbatch_options
    overrides = [each for each in left if "=" in each and not each.startswith("-")]
    if len(overrides) < len(left) or (left and not hasattr(args, "overrides")):
        from clip_tools.openclip.flags import suggest

        quote = "; quote the command as one argument"
        hint = quote if verb == "import-args" else suggest(left)
        if verb == "submit":
            hint += "; options of sbatch go after --, as in -- --qos=high"
        parser.error(f"unrecognized arguments: {' '.join(left)}{hint}")
    if left:
        args.overrides = [*args.overrides, *left]
    return args


def build_parser(verb: str = "") -> argparse.ArgumentParser:
    """The parser of the whole command, which knows the arguments of this verb alone."""
    parser = argparse.ArgumentParser(
        prog="clip-train",
        description="Train CLIP so that the result depends only on the global batch, not on how "
        "it is computed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"clip-train {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, each in VERBS.items():
        sub = verbs.add_parser(name, help=each.help)
        if name == verb:
            add_arguments(sub, each)
    return parser


def verb_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb, which `clip-train completion` reads."""
    parser = argparse.ArgumentParser(prog=f"clip-train {verb}")
    add_arguments(parser, VERBS[verb])
    return parser


def add_arguments(parser: argparse.ArgumentParser, verb: Verb) -> None:
    """The arguments of `verb`, and those that every verb has."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.load().add_arguments(parser)
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument(
        "--quiet", action="store_true", help="log only warnings and errors, no progress"
    )
    loudness.add_argument("--verbose", action="store_true", help="log retries and other details")
