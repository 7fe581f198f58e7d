"""The recipe's `evaluate` section."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from clip_train.settings import (
    MEAN,
    Allowed,
    ImportPath,
    Messages,
    Place,
    Removed,
    SetName,
    Settings,
    rule,
    shown,
)

IMAGENET = "imagenet"  # a name, not a file: OpenCLIP's classes and templates (imagenet.json)


Templates = Literal["openai", "simple"]


class SetConfig(Settings):
    """One data set of `evaluate.sets`."""

    data: Annotated[Place, Allowed("text", example="cars/*.tar")]
    """Shards, a folder of a clip_benchmark set, or a folder with a subfolder for each class."""
    classes: Place | None = None
    """As evaluate.zero_shot_classes. null: those of a clip_benchmark set; without them, the samples
    have captions."""
    templates: Templates | None = None
    """As evaluate.templates."""


class EvaluateConfig(Settings):
    """The evaluations, their data and their times: docs/evaluation.md."""

    removed: ClassVar = {
        "linear_probe": Removed(
            instead="use clip-train evaluate PLACE --linear-probe TRAIN",
            ignored=lambda value: value is None,
        )
    }

    every_steps: int | None = Field(None, gt=0)
    """Optimizer steps between evaluations; null: evaluate only at the end of the run."""
    batch_size: int = Field(256, gt=0)
    """Samples that a rank encodes at once. Only val_loss depends on it: a mean over batches of this
    size."""
    tokens: Annotated[
        list[Annotated[int, Field(gt=0)]] | None,
        Allowed("a list of numbers of patches, or null", example="'[128, 256]'"),
    ] = None
    """Native resolution (data.resize): evaluate also with at most so many patches of an image, as
    tokens_128/zero_shot_top1 and so on. Scores without such a prefix have the largest budget."""
    retrieval: bool = True
    """Recall of data.val's images by their captions, and of captions by their images, under three
    rules."""
    val_loss: bool = True
    """OpenCLIP's clip_val_loss on data.val."""
    zero_shot_classes: Place | None = None
    """imagenet: OpenCLIP's 1000 names; or a JSON file with "classnames", "templates" and how
    samples are labeled. null: no zero-shot."""
    templates: Templates | None = None
    """OpenCLIP's 80 or 7 prompts for each class, in place of those of zero_shot_classes; imagenet's
    own are openai."""
    zero_shot_data: Place | None = None
    """Labeled images: a folder with a subfolder for each class, such as ImageNet's validation set,
    or shards with `.cls`. null: data.val."""
    sets: Annotated[
        dict[SetName, SetConfig] | None,
        Allowed(
            "sections by names of letters, digits, dashes and underscores, or null",
            example="'{cars: {data: wds_cars}, coco: {data: coco/*.tar}}'",
        ),
    ] = None
    """More data sets, each with data, and for labeled images classes and templates. Their scores
    are named cars/zero_shot_top1 and so on; the means over sets with labels and over sets with
    captions are mean/zero_shot_top1 and so on."""

    functions: Annotated[
        list[ImportPath], Allowed("a list of import paths", example="'[my_package.metrics.margin]'")
    ] = Field([])
    """Evaluations of your own, by import path: each gets the features of all samples, and returns
    numbers by name (docs/extending.md)."""

    @property
    def set_places(self) -> dict[str, str]:
        """The data of `sets`, by key."""
        return {f"evaluate.sets.{name}.data": one.data for name, one in (self.sets or {}).items()}

    @rule
    def _own_names(self) -> Messages:
        if MEAN in (self.sets or {}):
            yield (
                f"evaluate.sets.{MEAN}: the scores named {MEAN}/... are the means over sets; give "
                "this set another name"
            )

    @rule
    def _labeled_data_need_classes(self) -> Messages:
        if self.zero_shot_data is not None and self.zero_shot_classes is None:
            yield (
                f"evaluate.zero_shot_data ({shown(self.zero_shot_data)}) is for zero-shot; set "
                "evaluate.zero_shot_classes as well"
            )
