"""The evaluations of a run as a table: a row for each data set, with the last and the best value of
each score.

A name in eval.jsonl is `[ema_][SET/][width_N/]METRIC` (docs/evaluation.md).
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clip_train.metrics.progress import format_number
from clip_train.settings import MEAN

# The columns of the table, and their titles. The other rules for recall (docs/evaluation.md) are
# among all scores: for most data they give the same numbers.
HEADLINES = {
    "image_to_text_R@1": "image to text R@1",
    "text_to_image_R@1": "text to image R@1",
    "zero_shot_top1": "zero-shot top-1",
    "val_loss": "validation loss",
}
COUNTS = ("num_samples", "zero_shot_samples")
OTHERS = ("zero_shot_top5", "zero_shot_mean_per_class_recall")  # of labeled images
LOWER_IS_BETTER = ("loss", "_mean_rank", "_median_rank")
_FRACTION = re.compile(r"(zero_shot_top|\w+_R@|\w+_recall@)\d+|zero_shot_mean_per_class_recall")
_RULES = re.compile(r"(dedup_)?(image_to_text|text_to_image)_|(image|text)_retrieval_recall@")


@dataclass
class Score:
    """One number of the evaluations."""

    name: str  # in eval.jsonl
    metric: str  # without its data set
    higher_is_better: bool | None  # None: unknown
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def is_fraction(self) -> bool:
        return _FRACTION.fullmatch(self.metric) is not None

    @property
    def title(self) -> str:
        return HEADLINES.get(self.metric, self.metric)

    @property
    def last(self) -> float:
        return self.values[-1]

    @property
    def best(self) -> tuple[float, int] | None:
        """The best value, and the first step that had it; None if it is unknown what is better."""
        if self.higher_is_better is None:
            return None
        value = max(self.values) if self.higher_is_better else min(self.values)
        return value, self.steps[self.values.index(value)]


@dataclass
class DataSet:
    """One row: the scores on a data set, of the weights or their moving average, with whole
    features or only their first values."""

    name: str
    variant: str = ""  # "moving average", "first 32 values"
    num_samples: int | None = None
    scores: dict[str, Score] = field(default_factory=dict)  # by metric

    @property
    def label(self) -> str:
        return f"{self.name}, {self.variant}" if self.variant else self.name

    @property
    def prefix(self) -> str:
        """The start of the names of the row's scores in eval.jsonl."""
        for score in self.scores.values():
            return score.name.removesuffix(score.metric)
        return ""

    def same_numbers(self) -> list[list[Score]]:
        """All scores in groups. The rules for one recall are a group if they give the same numbers
        at every evaluation."""
        groups: dict[tuple[Any, ...], list[Score]] = {}
        for score in self.scores.values():
            key = (recall_of(score.metric), *score.steps, *score.values)
            groups.setdefault(key, []).append(score)
        return list(groups.values())

    def own_scores(self) -> list[Score]:
        """The scores of `evaluate.functions`."""
        known = (*HEADLINES, *OTHERS, "unusable_samples")
        return [
            score
            for metric, score in self.scores.items()
            if metric not in known and _RULES.match(metric) is None
        ]


@dataclass
class Scores:
    """All evaluations of a run."""

    data_sets: list[DataSet]
    step: int | None  # of the last evaluation

    @property
    def columns(self) -> dict[str, str]:
        """The scores that the table shows: titles by metric."""
        used = {metric for row in self.data_sets for metric in row.scores}
        columns = {metric: title for metric, title in HEADLINES.items() if metric in used}
        own = [score for row in self.data_sets for score in row.own_scores()]
        # the score that decides which checkpoint is kept
        columns |= {
            score.metric: score.metric for score in own if score.higher_is_better is not None
        }
        return columns

    @property
    def rows(self) -> list[DataSet]:
        """The data sets that have a score of the columns."""
        columns = self.columns
        return [row for row in self.data_sets if columns.keys() & row.scores.keys()]


def read_scores(
    evaluations: Iterable[Mapping[str, Any]],
    places: Any,
    labelled: Any,
    keep_best: Any,
    sets: Any = None,
) -> Scores:
    """The scores in the records of eval.jsonl.

    places, labelled, keep_best, sets: the recipe's `data.val`, `evaluate.zero_shot_data`,
    `checkpoint.keep_best` and `evaluate.sets`; None if unknown.
    """
    named = names_of_sets(places, sets)
    best = str(keep_best or "")
    rows: dict[tuple[str, str], DataSet] = {}
    last_step = None
    # the last record of a step counts: a resumed run evaluates its last step again
    for step, record in sorted({record["step"]: record for record in evaluations}.items()):
        last_step = step
        for name, value in record.items():
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if name == "step" or not is_number:
                continue
            data_set, variant, metric = split_score_name(name, named)
            if metric.startswith("zero_shot_") and not data_set and labelled:
                data_set = "zero-shot"
            key = (data_set, variant)
            row = rows.setdefault(key, DataSet(data_set or "validation", variant))
            if metric in COUNTS:
                row.num_samples = row.num_samples or int(value)
                continue
            if metric not in row.scores:
                row.scores[metric] = Score(name, metric, is_higher_better(name, metric, best))
            row.scores[metric].steps.append(step)
            row.scores[metric].values.append(value)
    return Scores([row for row in rows.values() if row.scores], last_step)


def recall_of(metric: str) -> str:
    """OpenCLIP's name for a recall under any rule; other metrics unchanged."""
    metric = metric.removeprefix("dedup_")
    metric = metric.replace("text_retrieval_recall@", "image_to_text_R@")
    return metric.replace("image_retrieval_recall@", "text_to_image_R@")


def is_higher_better(name: str, metric: str, keep_best: str) -> bool | None:
    """keep_best: the recipe's key, which says it for one score, also of the user's own."""
    if keep_best.removeprefix("-") == name:
        return not keep_best.startswith("-")
    if _FRACTION.fullmatch(metric):
        return True
    if metric.endswith(LOWER_IS_BETTER):
        return False
    return None


def names_of_sets(places: Any, sets: Any) -> set[str] | None:
    """The names with which scores may begin; None if the recipe is unknown."""
    if places is None and not sets:
        return None
    names: set[str] = set()
    if isinstance(places, dict):
        names |= places.keys()
    if isinstance(sets, dict):
        names |= {*sets, MEAN}
    return names


def split_score_name(name: str, names: Collection[str] | None) -> tuple[str, str, str]:
    """The data set ("" if there is one without a name), the variant, and the metric.

    names: as `names_of_sets` returns them.
    """
    variants = []
    rest = name
    data_set = set_of(rest, names)
    if not data_set and name.startswith("ema_"):
        variants.append("moving average")
        rest = name.removeprefix("ema_")
        data_set = set_of(rest, names)
    if data_set:
        rest = rest.removeprefix(f"{data_set}/")
    narrow = re.match(r"width_(\d+)/(.+)", rest)
    if narrow is not None:
        variants.append(f"first {narrow[1]} values")
        rest = narrow[2]
    return data_set, ", ".join(variants), rest


def set_of(name: str, names: Collection[str] | None) -> str:
    """The data set with which the name of a score begins; "" if there is none."""
    first, slash, _ = name.partition("/")
    if not slash:
        return ""
    if names is not None:
        return first if first in names else ""
    # without a recipe, "ema_" more likely means the average than a part of a set's name
    return "" if first.startswith(("width_", "ema_")) else first


def score_text(score: Score, value: float) -> str:
    return f"{100 * value:.2f}%" if score.is_fraction else format_number(value)
