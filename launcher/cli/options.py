"""What `clip-train VERB` may be told, and its help."""

from __future__ import annotations

import argparse
import textwrap

from clip_train import __version__

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

EXAMPLES = {
    "train": """\
        clip-train train recipes/vit_b32.yaml                   all GPUs of this machine; the same line again goes on
        clip-train train recipes/vit_b32.yaml run.name=try batch.global_size=8192 optim.lr=1e-3
        clip-train train --keys                                 what a recipe can say""",
    "plan": """\
        clip-train plan recipes/vit_b32.yaml --world-size 64 --samples-per-second 20000
        clip-train plan recipes/vit_b32.yaml --world-size 64 batch.micro_size=auto batch.memory_limit=80GB""",
    "submit": """\
        clip-train submit recipes/vit_l14.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00 --dry-run   look first
        clip-train submit recipes/vit_l14.yaml --nodes 4 --partition gpu run.name=l14""",
    "doctor": """\
        clip-train doctor                                       this machine and its cluster
        clip-train doctor my.yaml checkpoint.remote=s3://bucket/run   its shards, captions, S3 and disk too""",
    "evaluate": """\
        clip-train evaluate my.yaml                             the newest checkpoint of that run
        clip-train evaluate my.yaml --weights runs/clip/export data.val='val/*.tar'""",
    "export": """\
        clip-train export runs/clip --output clip-b32           of a run on this disk
        clip-train export s3://bucket/run --step 20000          of a run elsewhere""",
    "index": """\
        clip-train index 's3://bucket/cc12m/{00000..01242}.tar'
        clip-train index shards/*.tar --check                   have they changed, or been damaged?""",
    "checkpoints": """\
        clip-train checkpoints runs/clip
        clip-train checkpoints s3://bucket/run --verify         read all of them""",
    "demo": """\
        clip-train demo
        clip-train demo --data digits run.steps=200             shorter""",
}

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
        verb: str, help: str, description: str, recipe: bool | str = True, place: bool = False
    ) -> argparse.ArgumentParser:
        sub = verbs.add_parser(
            verb,
            help=help,
            description=textwrap.dedent(description),
            epilog=examples_of(verb),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if recipe:
            sub.add_argument("recipe", nargs=None if recipe is True else recipe, metavar="RECIPE", help=RECIPE_HELP)
        if place:
            sub.add_argument("place", metavar="PLACE", help="a recipe, a run's folder, or a URL of checkpoints")
        sub.add_argument("overrides", nargs="*", metavar="key.path=value", help=OVERRIDE_HELP)
        return sub

    train = add(
        "train",
        "train, or go on training",
        """\
        Train the recipe; if its run directory has a checkpoint, go on from the newest complete one.
        Under torchrun, srun or another launcher, every rank runs this same line.""",
    )
    train.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="without a launcher: ranks on this machine (default: GPUs, else 1)",
    )
    train.add_argument("--keys", action="store_true", help="print every key of a recipe with its default, and exit")

    plan = add(
        "plan",
        "batch arithmetic, memory and length, without a GPU",
        "Print what a run would do: batch arithmetic, memory by what needs it, steps, time. Touches no GPU.",
    )
    plan.add_argument("--world-size", metavar="N", type=int, help="ranks (default: WORLD_SIZE, else 1)")
    plan.add_argument(
        "--samples-per-second",
        metavar="N",
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
    submit_options(submit)

    doctor = add(
        "doctor",
        "check this machine, the recipe and the cluster",
        """\
        One line for each thing that can go wrong: ok, warning or error, with the remedy. Exit status 1 with an error.
        Nothing is changed: what is written to try a disk or a bucket is removed.""",
        recipe="?",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")

    evaluate = add(
        "evaluate",
        "zero-shot and retrieval of a run's checkpoint",
        """\
        Evaluate on data.val: zero-shot with evaluate.zero_shot_classes, and retrieval. Instead of the recipe a run's
        folder will do, or the URL of a run's checkpoints: then the recipe is the one in the checkpoint.""",
    )
    evaluate.add_argument(
        "--weights", metavar="PLACE", help="an exported folder or a weights file instead of the run's newest checkpoint"
    )

    export = add(
        "export",
        "weights for OpenCLIP, as safetensors",
        """\
        Write a folder that open_clip loads, without a GPU. Instead of the recipe a run's folder will do, or the URL
        of a run's checkpoints: then none of the run's files are needed.""",
    )
    export.add_argument("--output", metavar="DIR", help="folder to write (default: <run.dir>/export)")
    export.add_argument("--step", metavar="N", type=int, help="the checkpoint of this step (default: the newest)")

    index = verbs.add_parser(
        "index",
        help="count and checksum shards, so that epochs are exact and damage is seen",
        description="Read shards once and write sizes.json and clip_train_index.json beside them, on disk or on S3.",
        epilog=examples_of("index"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    index.add_argument("shards", nargs="+", metavar="SHARDS", help="as data.train: paths, URLs, braces, globs")
    index.add_argument("--caption-key", metavar="KEY", help="as data.caption_key: count samples with it in their .json")
    index.add_argument("--workers", metavar="N", type=int, help="processes (default: one for each CPU, 2 to 16)")
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


def examples_of(verb: str) -> str:
    return "examples:\n" + textwrap.indent(textwrap.dedent(EXAMPLES[verb]), "  ")


def submit_options(submit: argparse.ArgumentParser) -> None:
    """What sbatch is asked for; what is not said comes from the site file."""
    for name, meaning in (
        ("nodes", "(default: the site's, else 1)"),
        ("gpus-per-node", "each with a rank (default: the site's, else 8)"),
        ("tasks-per-node", "ranks per node, where --gpus-per-node is 0"),
        ("cpus-per-task", "cores per rank (default: the site's, else 8)"),
    ):
        submit.add_argument(f"--{name}", metavar="N", type=int, help=meaning)
    submit.add_argument("--time", metavar="HH:MM:SS", help="limit of one attempt (default: the site's, else 24:00:00)")
    submit.add_argument("--partition", metavar="NAME", help="where to (default: the site's, else the cluster's)")
    submit.add_argument("--account", metavar="NAME", help="whom to charge")
    submit.add_argument("--qos", metavar="NAME", help="quality of service")
    submit.add_argument(
        "--template",
        choices=["single", "train", "chain", "torchrun"],
        help="of slurm/ (default: single or train, by --nodes); chain: where jobs may not requeue",
    )
    submit.add_argument(
        "--site", metavar="FILE", help="the site's defaults (default: $CLIP_TRAIN_SITE, ~/.config/clip-train/site.yaml)"
    )
    submit.add_argument("--dry-run", action="store_true", help="check, print the batch script, and submit nothing")
    submit.add_argument("--offline", action="store_true", help="look neither at shards nor at checkpoint.remote")
