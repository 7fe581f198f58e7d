"""The data sets of an evaluation, from the keys that name them: `data.val`,
`evaluate.zero_shot_data` and `evaluate.sets`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clip_train.data.benchmark import has_classes
from clip_train.errors import unreadable
from clip_train.storage.redact import redact

if TYPE_CHECKING:
    from clip_train.recipe.recipe import Recipe


@dataclass(frozen=True)
class EvaluationSet:
    """One data set. It has captions, or labels and `classes`; `data.val` may have both."""

    place: str
    key: str  # of the recipe, for messages; it names `place`
    name: str = ""  # its scores are NAME/val_loss and so on; "": without a prefix
    captions: bool = True  # for retrieval, val_loss and evaluate.functions
    classes: str | None = None  # as evaluate.zero_shot_classes; None: no zero-shot
    classes_key: str = "evaluate.zero_shot_classes"
    templates: str | None = None  # as evaluate.templates
    counts_in_mean: bool = False  # it is one of evaluate.sets
    # labeled images on which a linear probe is fitted, which is tested on this set; None: no probe
    train: str | None = None

    @property
    def without_zero_shot(self) -> str:
        """For messages: how to do without its labels."""
        if self.counts_in_mean:
            return f"take evaluate.sets.{self.name} out"
        return f"set {self.classes_key}=null"


def evaluation_sets(config: Recipe) -> list[EvaluationSet]:
    """All data sets, in the order in which they are evaluated.

    A set of `evaluate.sets` has labels if it has `classes`, or if its data are a clip_benchmark set
    with classes, which is looked up. Otherwise it has captions.

    Raises:
        UserError, RankError: a store does not answer.
    """
    evaluate = config.evaluate
    sets = []
    for key, place in config.data.val_places.items():
        classes = evaluate.zero_shot_classes if evaluate.zero_shot_data is None else None
        name = key.removeprefix("data.val").removeprefix(".")
        sets.append(EvaluationSet(place, key, name, classes=classes, templates=evaluate.templates))
    if evaluate.zero_shot_data is not None:
        sets.append(
            EvaluationSet(
                evaluate.zero_shot_data,
                "evaluate.zero_shot_data",
                captions=False,
                classes=evaluate.zero_shot_classes,
                templates=evaluate.templates,
            )
        )
    for name, one in (evaluate.sets or {}).items():
        classes = one.classes
        key = f"evaluate.sets.{name}.data"
        try:
            if classes is None and has_classes(one.data):
                classes = one.data
        except OSError as e:
            raise unreadable(e, f"{key} ({redact(one.data)}) cannot be read: {e}") from e
        sets.append(
            EvaluationSet(
                one.data,
                key,
                name,
                captions=classes is None,
                classes=classes,
                classes_key=f"evaluate.sets.{name}.classes",
                templates=one.templates,
                counts_in_mean=True,
            )
        )
    return sets
