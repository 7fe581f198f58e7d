"""Arguments and help of every `clip-train VERB`. Imports nothing heavy, so help appears at once."""

import argparse
import textwrap
from dataclasses import dataclass
from typing import Any

from clip_train import __version__
from clip_train.errors import UserError
from clip_train.places import expanded

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

SHELLS = ("bash", "zsh")
POSITIONS: dict[str, dict[str, Any]] = {
    "recipe": {"metavar": "RECIPE", "help": "a recipe (YAML); recipes/ has examples"},
    "place": {"metavar": "PLACE", "help": "a recipe, a run's folder, or a URL of checkpoints"},
    "prefix": {"metavar": "PREFIX", "help": "a section, or how a key begins"},
    "command": {
        "metavar": "COMMAND",
        "help": "one argument in quotes",
    },
    "source": {
        "metavar": "SOURCE",
        "help": "a .csv, .tsv, .jsonl or .parquet; a folder of images",
    },
    "out": {"metavar": "OUT", "help": "folder for the shards"},
    "shell": {"metavar": "SHELL", "choices": SHELLS, "help": f"one of {', '.join(SHELLS)}"},
    "shards": {
        "metavar": "SHARDS",
        "nargs": "+",
        "help": "as data.train: paths, URLs, braces, globs",
    },
    "checkpoints": {
        "metavar": "PLACE@STEP,...",
        "help": "folders or URLs of runs, each with a step",
    },
    "run": {"metavar": "RUN", "help": "a run's folder, or its recipe"},
    "runs": {"metavar": "RUN", "nargs": "+", "help": "runs' folders, or their recipes"},
    "overrides": {
        "metavar": "key.path=value",
        "nargs": "*",
        "help": "overrides of the recipe, such as batch.global_size=4096 optim.lr=1e-3",
    },
}
JSON = ("json", None, "print JSON")
STEP = ("step", "N", "the checkpoint of this step (default: the newest)")
EMA = ("ema", None, "the moving average of its weights (optim.ema_decay)")
EXPORT_FORMAT = (
    "format",
    ["open_clip", "transformers", "peft"],
    "for which library (default: open_clip)",
    "open_clip",
)


@dataclass(frozen=True)
class Verb:
    """One verb: its function, its arguments and its help."""

    run: str  # module:function, which is called with the parsed arguments
    help: str
    description: str
    examples: str
    positions: tuple[str, ...] = ("recipe", "overrides")
    options: tuple[
        tuple[Any, ...], ...
    ] = ()  # name, metavar (None: a switch; a list: its choices), help, default


DRY_RUN = "clip_tools.plan:dry_run"  # of `train --dry-run`
VERBS = {
    "train": Verb(
        "launcher.runtime.launch:run",
        "train, or resume training",
        """\
    Train the recipe; if its run directory has a checkpoint, resume from the newest complete
    one. Under torchrun, srun or another launcher, every rank runs this same line.""",
        """\
    clip-train train recipes/vit_b32.yaml                   all GPUs; the same line again resumes
    clip-train train recipes/vit_b32.yaml run.name=try batch.global_size=8192 optim.lr=1e-3
    clip-train train recipes/vit_b32.yaml --ranks 2         two ranks, without a launcher""",
        options=(
            ("ranks", "N", "without a launcher: ranks on this machine (default: GPUs, else 1)"),
            (
                "dry-run",
                None,
                "check recipe, shards and devices, print the plan, and start nothing",
            ),
        ),
    ),
    "keys": Verb(
        "clip_tools.keys:run",
        "every key that a recipe can hold",
        "Print one line for each key: its default, its allowed values and its meaning.",
        """\
    clip-train keys                                         all of them
    clip-train keys optim                                   those that begin with it
    clip-train keys loss.kind=my_package.losses.margin      the options of that function or class
    clip-train keys --markdown > docs/recipe.md             the page of the documentation""",
        positions=("prefix?",),
        options=(("markdown", None, "as a page with a table for each section"),),
    ),
    "plan": Verb(
        "clip_tools.plan:run",
        "batch arithmetic, memory and length, without a GPU",
        "Print the plan of a run: batch arithmetic, memory by part, steps. Touches no GPU.",
        """\
    clip-train plan recipes/vit_b32.yaml --world-size 64
    clip-train plan recipes/vit_b32.yaml --world-size 8 batch.micro_size=auto --gpu H200
    clip-train plan recipes/vit_l14.yaml --world-size 64 --gpu H200     what fits
    clip-train plan recipes/vit_bigg14.yaml --world-size 128 --gpu H100 --network 8x400Gb""",
        options=(
            ("world-size", "N", "ranks (default: 1)"),
            (
                "gpu",
                "NAME",
                "H200, H100, A100-80, ...: its memory limits; the choices of auto; communication",
            ),
            (
                "network",
                "SPEED",
                "with --gpu: Gbit/s of a node, all of its adapters together: 400Gb, 8x400Gb",
            ),
            ("gpus-per-node", "N", "one rank per GPU (default: 8)"),
            JSON,
        ),
    ),
    "submit": Verb(
        "launcher.slurm.submit:run",
        "render, check and submit a SLURM job",
        """\
    Check everything that would fail after hours in the queue, freeze recipe and code beside the
    batch script, and hand it to sbatch. The job requeues itself until it is done, or gives up:
    docs/slurm.md. Options after -- are sbatch's own.""",
        """\
    clip-train submit recipes/vit_l14.yaml --nodes 4 --time 24:00:00 --dry-run   look first
    clip-train submit recipes/vit_l14.yaml --nodes 4 --partition gpu run.name=l14
    clip-train submit recipes/vit_l14.yaml --nodes 4 -- --constraint=a100""",
        options=(
            ("nodes", "N", "(default: the site's, else 1)"),
            ("gpus-per-node", "N", "one rank per GPU (default: the site's, else 8)"),
            ("tasks-per-node", "N", "ranks per node, where --gpus-per-node is 0"),
            ("cpus-per-task", "N", "cores per rank (default: the site's, else 8)"),
            (
                "time",
                "HH:MM:SS",
                "limit of one attempt (default: the site's, else 24:00:00)",
            ),
            ("partition", "NAME", "partition of the job (default: the site's, else the cluster's)"),
            ("account", "NAME", "account to charge"),
            (
                "template",
                ["train", "torchrun"],
                "the batch script in slurm/ (default: train)",
            ),
            (
                "site",
                "FILE",
                "the site's defaults (default: $CLIP_TRAIN_SITE, ~/.config/clip-train/site.yaml)",
            ),
            ("dry-run", None, "check, print the batch script, and submit nothing"),
            ("offline", None, "skip the checks of shards and checkpoint.remote"),
        ),
    ),
    "doctor": Verb(
        "clip_tools.doctor:run",
        "check this machine, the recipe and the cluster",
        """\
    One line for each thing that can go wrong: ok, warning or error, with the remedy. Exit
    status 1 with an error. Nothing is changed: test files on a disk or in a bucket are removed.""",
        """\
    clip-train doctor                                       this machine and its cluster
    clip-train doctor my.yaml checkpoint.remote=s3://bucket/run   its shards, S3, disk too
    salloc --nodes 4 clip-train doctor --all-nodes          all pairs of nodes""",
        positions=("recipe?", "overrides"),
        options=(("all-nodes", None, "measure all pairs of nodes of this job"), JSON),
    ),
    "evaluate": Verb(
        "clip_tools.inspect:evaluate_run",
        "zero-shot, retrieval and validation loss of a run or of any weights",
        """\
    Evaluate on data.val and evaluate.zero_shot_data: docs/evaluation.md. With a URL or a
    bare folder of checkpoints, the recipe comes from the checkpoint. PLACE may also be weights
    (an exported folder, hf-hub:org/name, open_clip:NAME/TAG; a file with model.name=NAME).""",
        """\
    clip-train evaluate my.yaml                             the newest checkpoint of that run
    clip-train evaluate my.yaml --weights runs/clip/export data.val='val/*.tar'
    clip-train evaluate open_clip:ViT-B-32/openai data.val='val/*.tar'""",
        positions=("place", "overrides"),
        options=(
            (
                "weights",
                "PLACE",
                "an exported folder or weights instead of the run's newest checkpoint",
            ),
            STEP,
            EMA,
            JSON,
        ),
    ),
    "embed": Verb(
        "clip_tools.embed:embed_run",
        "the features of a data set, as .npy files",
        """\
    Write the image and text features of data.val, with the keys and captions of the samples.
    PLACE is as for evaluate. Under torchrun each rank embeds its share.""",
        """\
    clip-train embed runs/clip data.val='s3://bucket/{0000..0099}.tar' --output features
    clip-train embed open_clip:ViT-B-32/openai data.val='val/*.tar' --images-only""",
        positions=("place", "overrides"),
        options=(
            ("output", "DIR", "folder to write (default: features)", "features"),
            ("images-only", None, "samples need no captions, and no texts are embedded"),
            ("weights", "PLACE", "weights instead of the run's newest checkpoint"),
            STEP,
            EMA,
        ),
    ),
    "reinforce": Verb(
        "clip_tools.reinforce:run",
        "shards with teachers' features, augmentations and synthetic captions",
        """\
    Write SHARDS again: each sample with stored augmentations, and with the features that one or
    more teachers have of each of them and of its captions. data.reinforced trains on them. Under
    torchrun each rank writes its share. The same line again continues after an interruption. A
    teacher is any PLACE that evaluate takes.""",
        """\
    clip-train reinforce 'cc12m/*.tar' --teacher open_clip:ViT-L-14/openai --to cc12m-dr
    clip-train reinforce 's3://b/{00..99}.tar' --teacher runs/large,runs/other --to s3://b/dr""",
        positions=("shards",),
        options=(
            ("teacher", "PLACES", "the teachers, separated by commas"),
            ("to", "PLACE", "the folder or URL for the shards"),
            ("augmentations", "N", "augmentations per image (default: 10)", 10),
            ("crop", "AREA", "the smallest fraction of an image in a crop (default: 0.08)", 0.08),
            (
                "synthetic-key",
                "NAME",
                "where synthetic captions are, as data.caption_key (default: syn.json)",
                "syn.json",
            ),
            (
                "alpha",
                "KIND",
                "transparent pixels, as data.alpha in training: white or drop (default: white)",
                "white",
            ),
            ("half", None, "write features with 16 bits; loss curves then differ by this rounding"),
        ),
    ),
    "caption": Verb(
        "clip_tools.embed:caption_run",
        "captions of the images in a folder, by a CoCa",
        """\
    Print a line of JSON for each image in --images and the folders below it: its file, and the
    caption that the model's decoder writes. PLACE is as for evaluate.""",
        """\
    clip-train caption open_clip:coca_ViT-B-32/laion2b_s13b_b90k --images photos
    clip-train caption open_clip:coca_ViT-L-14/laion2b_s13b_b90k --images photos""",
        positions=("place", "overrides"),
        options=(
            ("images", "DIR", "the folder (default: the current one)", "."),
            ("weights", "PLACE", "weights instead of the run's newest checkpoint"),
            STEP,
            EMA,
        ),
    ),
    "export": Verb(
        "clip_tools.inspect:export_run",
        "weights for OpenCLIP or transformers, as safetensors",
        """\
    Write a folder that open_clip, or transformers, loads, without a GPU. A run's
    folder of checkpoints or their URL is enough: no other file of the run is needed.""",
        """\
    clip-train export runs/clip --output clip-b32           of a run on this disk
    clip-train export s3://bucket/run --step 20000          of a run elsewhere
    clip-train export runs/clip --format transformers       for transformers.CLIPModel
    clip-train export runs/clip --format peft               adapters (model.lora) alone""",
        positions=("place", "overrides"),
        options=(
            ("output", "DIR", "folder to write (default: <run.dir>/export)"),
            STEP,
            EXPORT_FORMAT,
            EMA,
        ),
    ),
    "branch": Verb(
        "clip_tools.branch:run",
        "a new run that starts from another run's checkpoint and cools down",
        """\
    Write the recipe of a run that begins at a checkpoint of PLACE and lowers the rate from there:
    a name, a run directory and a checkpoint.remote of its own. The source can continue; it must
    have a constant rate at that step. Overrides apply to the new run.""",
        """\
    clip-train branch runs/clip --at 20000 --cooldown 4000
    clip-train branch runs/clip run.name=try schedule.final_lr=1e-6""",
        positions=("place", "overrides"),
        options=(
            ("at", "N", "the checkpoint of this step (default: the newest)"),
            ("cooldown", "N", "steps in which the rate falls (default: a fifth of the step)"),
        ),
    ),
    "average": Verb(
        "clip_tools.inspect:average_run",
        "the mean of checkpoints' weights, as an export",
        """\
    Average the weights of checkpoints of one run or of several, in fp32 and one tensor at a time.
    The folder is what export writes: evaluate and model.init_from take it.""",
        """\
    clip-train average runs/clip@18000,runs/clip@20000 --output mean
    clip-train average runs/a@20000,runs/b@20000""",
        positions=("checkpoints",),
        options=(
            ("output", "DIR", "folder to write (default: average)", "average"),
            EXPORT_FORMAT,
            EMA,
        ),
    ),
    "shards": Verb(
        "clip_tools.shards.command:run",
        "a table or a folder of images with captions as shards",
        """\
    Write WebDataset shards and their index. Rows whose image or caption cannot be used are left
    out and reported. After an interruption, run it again to continue. For URLs, use
    img2dataset.""",
        """\
    clip-train shards captions.csv shards                   columns are found, or --image-key ...
    clip-train shards photos shards                         each x.jpg with its x.txt
    clip-train shards birds.csv birds --label-key kind      with birds/classes.json""",
        positions=("source", "out"),
        options=(
            (
                "image-key",
                "NAME",
                "column of the image's path or bytes (default: filepath, file_name, image, ...)",
            ),
            (
                "caption-key",
                "NAMES",
                "columns of captions: the first with one counts, all are kept by name (default: "
                "title, ...)",
            ),
            (
                "label-key",
                "NAME",
                "column of labels for evaluation: numbers become .cls, names this field of the "
                ".json",
            ),
            ("keep-columns", "NAMES", "further columns, separated by commas, for the .json"),
            ("images", "DIR", "base folder of relative paths (default: SOURCE's folder)"),
            ("per-shard", "N", "rows in a shard (default: 1000)"),
            ("workers", "N", "processes (default: one for each CPU)"),
        ),
    ),
    "index": Verb(
        "clip_tools.shards.index:run",
        "count and checksum shards, so that epochs are exact and damage is seen",
        "Read shards once and write clip_train_index.json beside them, on disk or on S3.",
        """\
    clip-train index 's3://bucket/cc12m/{00000..01242}.tar'
    clip-train index shards/*.tar --check                   check for changes and damage""",
        positions=("shards",),
        options=(
            (
                "caption-key",
                "NAMES",
                "as data.caption_key: samples with one of these can be used (default: txt)",
            ),
            ("workers", "N", "processes (default: one for each CPU, 2 to 16)"),
            ("check", None, "read again and compare with the index; write nothing"),
        ),
    ),
    "checkpoints": Verb(
        "clip_tools.inspect:list_run",
        "list checkpoints, their state, and which will be kept",
        """\
    List the checkpoints of a run, on its disk and in checkpoint.remote. Exit status 1 if a
    committed checkpoint is damaged.""",
        """\
    clip-train checkpoints runs/clip
    clip-train checkpoints s3://bucket/run --verify         read all of them""",
        positions=("place", "overrides"),
        options=(("verify", None, "read every byte and compare it with its sha256"), JSON),
    ),
    "report": Verb(
        "clip_tools.report:write",
        "write an HTML report of a run",
        "Write report.html of a run: health, scores, curves, validation images, attempts, and "
        "differences from the defaults. It works while the run trains; at its end, a run writes "
        "the page itself.",
        """\
    clip-train report runs/clip
    clip-train report my.yaml                               the run of that recipe""",
        positions=("run",),
    ),
    "watch": Verb(
        "clip_tools.report:watch",
        "runs in the terminal, live",
        "Show progress, health, the latest metrics, scores, attempts and GPU-hours until all runs "
        "are done, or Ctrl-C.",
        """\
    clip-train watch runs/clip
    clip-train watch runs/clip --once                       print it and end""",
        positions=("runs",),
        options=(("once", None, "print it and end"),),
    ),
    "import-args": Verb(
        "clip_tools.openclip.command:run",
        "an OpenCLIP command line as a recipe",
        """\
    Print the recipe for an OpenCLIP command line. Comments above it explain flags with another
    meaning here. Replace the variables of a script by their values first.""",
        """\
    clip-train import-args "torchrun --nproc_per_node 8 -m main --train-data a.tar" > my.yaml
    clip-train import-args "python -m main --train-data a.tar" --world-size 16""",
        positions=("command",),
        options=(
            (
                "world-size",
                "N",
                "GPUs, if the command does not say (default: torchrun's, else 1)",
            ),
        ),
    ),
    "demo": Verb(
        "clip_tools.demo:run",
        "train a small CLIP in minutes and see it work",
        """\
    Build a small data set, train on it with micro-batches and the feature cache, and evaluate
    zero-shot. It draws captioned shapes, and tests on color-shape-size-background combinations
    never seen in training.""",
        """\
    clip-train demo
    clip-train demo run.steps=100 data.num_samples=5000     shorter""",
        positions=("overrides",),
        options=(("dir", "DIR", "folder for data and runs (default: runs)", "runs"),),
    ),
    "completion": Verb(
        "clip_tools.keys:complete",
        "shell completion for this command",
        "Print a script for bash or zsh that completes verbs, options and recipe keys.",
        """\
    clip-train completion bash > ~/.local/share/bash-completion/completions/clip-train
    clip-train completion zsh > ~/.clip-train.zsh           in .zshrc: source ~/.clip-train.zsh""",
        positions=("shell",),
    ),
}


def place(text: str) -> str:
    """The type of an argument that is a path or a URL."""
    try:
        return expanded(text)
    except UserError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def places(text: str) -> str:
    return ",".join(place(each) for each in text.split(","))


TYPES = {"N": int, "AREA": float, "DIR": place, "FILE": place, "PLACE": place, "PLACES": places}
for _name in ("recipe", "place", "source", "out", "shards", "run", "runs"):
    POSITIONS[_name]["type"] = place
POSITIONS["checkpoints"]["type"] = places


def build_parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="clip-train",
        description="Train CLIP so that the result depends only on the global batch, not on how "
        "it is computed.",
        epilog=EPILOG,
        formatter_class=style,
    )
    parser.add_argument("--version", action="version", version=f"clip-train {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        examples = "examples:\n" + textwrap.indent(textwrap.dedent(verb.examples), "  ")
        sub = verbs.add_parser(
            name,
            help=verb.help,
            description=textwrap.dedent(verb.description),
            epilog=examples,
            formatter_class=style,
        )
        for position in verb.positions:
            nargs: dict[str, Any] = {"nargs": "?"} if position.endswith("?") else {}
            sub.add_argument(position.rstrip("?"), **POSITIONS[position.rstrip("?")], **nargs)
        for option, metavar, text, *default in verb.options:
            takes: dict[str, Any] = {"metavar": metavar, "type": TYPES.get(str(metavar), str)}
            if metavar is None:
                takes = {"action": "store_true"}
            elif isinstance(metavar, list):
                takes = {"choices": metavar}
            sub.add_argument(
                f"--{option}", help=text, **takes, **({"default": default[0]} if default else {})
            )
        loudness = sub.add_mutually_exclusive_group()
        loudness.add_argument(
            "--quiet", action="store_true", help="log only warnings and errors, no progress"
        )
        loudness.add_argument(
            "--verbose", action="store_true", help="log retries and other details"
        )
    return parser
