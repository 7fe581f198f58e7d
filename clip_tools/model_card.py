"""The README.md of an export: the model card that the Hugging Face hub shows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_train import __version__
from clip_train.data.shards import split_sources
from clip_train.metrics.jsonl import iter_jsonl
from clip_train.metrics.progress import format_number
from clip_train.metrics.run import Run
from clip_train.metrics.scores import Scores, read_scores, score_text
from clip_train.models import hub
from clip_train.recipe.recipe import Recipe, check_config, without_removed
from clip_train.storage.local import LocalStorage
from clip_train.storage.redact import redact
from clip_train.yaml_text import dump_yaml

CURVE_ROWS = 10  # of the table of the curve
# The sections of a recipe that say how the model was trained.
SECTIONS = ("run", "model", "data", "batch", "loss", "engine", "optim", "schedule")
NOT_TRAINING = {"run": ("name", "dir"), "data": ("val", "workers", "prefetch", "verify")}
CURVES = ("loss", "lr", "logit_scale")  # columns of the table of the curve
DATA_SET = r"(?:hf://|huggingface\.co/)datasets/([\w.-]+/[\w.-]+)"  # in data.train
BASES = ("init_from", "init_image_from", "init_text_from")


@dataclass(frozen=True)
class Card:
    """What a card is written from."""

    recipe: Mapping[str, Any]  # as the checkpoint has it
    step: int
    run_dir: Path | None  # its curve and scores; None: only the checkpoint is here
    library: str | None  # as the hub calls it; None: a model of the user's own
    load: str  # the line of Python that loads the model
    ema: bool = False
    license: str | None = None


def write_card(folder: Path, card: Card) -> None:
    LocalStorage(folder).put_bytes("README.md", render(card).encode())


def render(card: Card) -> str:
    config = check_config(without_removed(card.recipe), "the checkpoint's recipe")
    scores = scores_of(card)
    blocks = [
        [f"---\n{dump_yaml(front_matter(card, config, scores))}---"],
        [f"# {config.run.name}"],
        summary(card, config),
        ["```python", *usage(card.load), "```"],
        ["## Scores"],
        score_lines(scores),
        ["## Curve"],
        curve_lines(card),
        ["## Recipe"],
        ["The keys that differ from the defaults of `clip-train keys`:"],
        ["```yaml", dump_yaml(trained_keys(config)).rstrip(), "```"],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def usage(load: str) -> list[str]:
    """Python that loads the model; with OpenCLIP also its preprocessing and tokenizer."""
    module = module_of(load)
    lines = [f"import {module}", ""]
    if module != "open_clip":
        return [*lines, f"model = {load}"]
    place = load.partition("(")[2]
    return [
        *lines,
        f"model, _, preprocess = {load}",
        f"tokenizer = open_clip.get_tokenizer({place}",
    ]


def module_of(line: str) -> str:
    """The module that a line such as `safetensors.torch.load_file(...)` needs."""
    match = re.match(r"[a-z_]+(?:\.[a-z_]+)*(?=\.\w+[.(])", line)
    assert match is not None
    return match[0]


def front_matter(card: Card, config: Recipe, scores: Scores) -> dict[str, Any]:
    """The keys that the hub reads. A key without a value is left out."""
    metrics = {metric for row in scores.data_sets for metric in row.scores}
    names = []
    if "zero_shot_top1" in metrics:
        names.append("accuracy")
    if any("_R@" in metric for metric in metrics):
        names.append("recall")
    keys = {
        "license": card.license,
        "library_name": card.library,
        "pipeline_tag": "zero-shot-image-classification" if card.library else None,
        "tags": ["clip", "clip-train"],
        "base_model": base_repositories(config),
        "datasets": list(dict.fromkeys(re.findall(DATA_SET, config.data.train))),
        "metrics": names,
    }
    return {key: value for key, value in keys.items() if value}


def base_repositories(config: Recipe) -> list[str]:
    """The hub's repositories of the initial weights."""
    places = [getattr(config.model, key) for key in BASES]
    found = []
    for place in places:
        if place is not None and hub.is_on_hub(place):
            found.append(hub.resolve(place).repository)
    return list(dict.fromkeys(found))


def summary(card: Card, config: Recipe) -> list[str]:
    weights = "the moving average of the weights" if card.ema else "the weights"
    bases = [
        f"`{redact(getattr(config.model, key))}` (model.{key})"
        for key in BASES
        if getattr(config.model, key) is not None
    ]
    sources = [f"`{redact(source)}`" for source in split_sources(config.data.train)]
    samples = f", {config.data.num_samples:,} samples" if config.data.num_samples else ""
    return [
        f"`{config.model.name}`: {weights} after {card.step:,} steps of training with clip-train "
        f"{__version__}.",
        "",
        f"- Base: {', '.join(bases) or 'none, trained from random weights'}",
        f"- Data: {', '.join(sources)}{samples}",
        f"- Loss: {config.loss.kind}, over a global batch of {config.batch.global_size:,}",
        f"- Optimizer: {config.optim.name}, learning rate {format_number(config.optim.lr)}",
    ]


def scores_of(card: Card) -> Scores:
    """The scores of the exported weights: at their step, or the last before it."""
    records: list[dict[str, Any]] = []
    if card.run_dir is not None and (card.run_dir / "eval.jsonl").is_file():
        records = [x for x in iter_jsonl(card.run_dir / "eval.jsonl") if x["step"] <= card.step]
    evaluate = card.recipe.get("evaluate") or {}
    scores = read_scores(
        records[-1:],
        places=(card.recipe.get("data") or {}).get("val"),
        labelled=evaluate.get("zero_shot_data"),
        keep_best=None,
        sets=evaluate.get("sets"),
    )
    rows = [row for row in scores.data_sets if ("moving average" in row.variant) == card.ema]
    return Scores(rows, scores.step)


def score_lines(scores: Scores) -> list[str]:
    if not scores.rows:
        return ["This run has no evaluation of these weights."]
    columns = scores.columns
    table = [["data set", "images", *columns.values()]]
    for row in scores.rows:
        cells = [row.scores.get(metric) for metric in columns]
        texts = ["" if score is None else score_text(score, score.last) for score in cells]
        images = "" if row.num_samples is None else f"{row.num_samples:,}"
        table.append([row.label, images, *texts])
    return [*table_lines(table), "", f"From the evaluation at step {scores.step:,}."]


def curve_lines(card: Card) -> list[str]:
    if card.run_dir is None:
        return ["The run's folder was not at hand."]
    run = Run(card.run_dir)
    loss = run.curves.get("loss")
    steps = [step for step in loss.steps if step <= card.step] if loss is not None else []
    if loss is None or not steps:
        return ["The run's folder has no metrics of these steps."]
    last = len(steps) - 1
    shown = sorted({round(i * last / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS)})
    table = [["step", *CURVES]]
    for i in shown:
        table.append([f"{steps[i]:,}", *(value_at(run, name, steps[i]) for name in CURVES)])
    return table_lines(table)


def value_at(run: Run, name: str, step: int) -> str:
    curve = run.curves.get(name)
    if curve is None or step not in curve.steps:
        return ""
    return format_number(curve.values[curve.steps.index(step)])


def table_lines(rows: list[list[str]]) -> list[str]:
    """Markdown; the first row is the head. All columns but the first are numbers."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]]


def trained_keys(config: Recipe) -> dict[str, Any]:
    """The keys of the recipe that say how the model was trained, and differ from their defaults."""
    given = redact(config.model_dump(mode="json", exclude_defaults=True))
    keys: dict[str, Any] = {}
    for name in SECTIONS:
        left_out = NOT_TRAINING.get(name, ())
        section = {k: v for k, v in given.get(name, {}).items() if k not in left_out}
        if section:
            keys[name] = section
    return keys
