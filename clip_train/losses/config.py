"""The `loss` section of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from clip_train.errors import UserError
from clip_train.settings import (
    IMPORT_PATH,
    Allowed,
    Matmul,
    Messages,
    Refused,
    Rounding,
    Settings,
    call_imported,
    import_path,
    is_import_path,
    rule,
    shown,
)

if TYPE_CHECKING:  # a recipe is read without torch
    from clip_train.losses.distillation import Teacher
    from clip_train.task import Objective

KINDS = (
    "info_nce",
    "sigmoid",
    "memory_bank",
)  # short names; `LossConfig.build` has their objectives
Factor = Annotated[float, Field(gt=0, le=1e9)]


class LossConfig(Settings):
    """Which objective is minimized over the global batch."""

    kind: Annotated[
        str,
        Allowed(f"{', '.join(KINDS)} or the import path of a function or class"),
        Refused,
    ] = Field("info_nce", pattern=rf"^({'|'.join(KINDS)}|{IMPORT_PATH})$")
    """info_nce: CLIP's symmetric cross-entropy, where every other sample of the global batch is a
    negative. sigmoid: SigLIP's loss, which treats each pair by itself; the model needs a bias
    (model.init_logit_bias). memory_bank: info_nce with additional features from past batches
    (ContAccum). An import path names a function of all features, or a subclass of
    `clip_train.task.Objective` (docs/extending.md)."""
    options: Annotated[dict[str, Any], Refused] = Field({})
    """With an import path: the keyword arguments of the function or class."""
    exchange: Annotated[Literal["gather", "ring"], Rounding] = "gather"
    """info_nce, sigmoid: how ranks see each other's texts. gather: all at once. ring: one rank's
    at a time, so that no rank holds the global batch's features."""
    groups: Annotated[
        str | None,
        Allowed("caption, json. with a key of the samples' .json, or null", example="caption"),
        Refused,
    ] = Field(None, pattern=r"^(caption|json\..+)$")
    """For info_nce and sigmoid. Samples of one group are not negatives of each other. caption:
    equal captions are a group; case and spaces do not count. json.x: equal values of the key x of
    the `.json` are a group. A sample without this key is in no group."""
    group_role: Annotated[Literal["leave_out", "positives"], Refused] = "leave_out"
    """leave_out: a sample of the same group is neither a negative nor a positive. positives: it is
    a positive, like the sample's own pair; info_nce takes the mean over them (SupCon)."""
    bank_size: PositiveInt = 4096
    """memory_bank: how many past pairs are kept, in samples. Each rank holds all: 2 x 4 x D bytes a
    pair."""
    bank_warmup_steps: NonNegativeInt = 1000
    """memory_bank: optimizer steps before the banks count; they fill from the first. Early features
    go stale quickly, and a bank of them can keep a model from learning at all."""
    bank_mode: Literal["negatives", "contaccum"] = "negatives"
    """memory_bank: whether past pairs are only negatives of the current ones, or also terms of the
    loss, as in the paper (arXiv 2406.12356)."""
    caption_weight: NonNegativeFloat = 2.0
    """For a CoCa model: the factor of the captions' cross-entropy, a mean over the tokens of the
    global batch. 0 trains no decoder: also set model.freeze=['text_decoder.*']."""
    contrastive_weight: NonNegativeFloat = 1.0
    """For a CoCa model: the factor of the contrastive loss; 0 trains the captions alone."""
    widths: Annotated[
        dict[PositiveInt, PositiveFloat] | None,
        Field(min_length=1),
        Allowed(
            "keys such as 512: 1, a number of values and a weight above 0",
            example="'{32: 1, 8: 0.5}'",
        ),
        Refused,
    ] = None
    """Matryoshka (arXiv 2205.13147), such as {512: 1, 256: 1, 64: 0.5}. For each width, the loss
    uses only the first values of each feature, normalized again. The total is their sum with these
    weights. Evaluations report each width as well. null: all values, once."""
    distill_weights: Annotated[
        tuple[NonNegativeFloat, NonNegativeFloat], Allowed("a list of 2 numbers"), Refused
    ] = (1.0, 1.0)
    """With teachers: the factors of CLIP's loss and of the cross-entropy with the teachers'
    softmaxes. [1, 1] is OpenCLIP's distillation; DataCompDR-12M is trained with [0, 1]."""
    teacher_scales: Annotated[
        list[Factor] | None, Allowed("a list of numbers greater than 0, or null"), Refused
    ] = None
    """The factor of each teacher's logits, such as [70, 60]; null: the teacher's own factor, which
    shards (data.reinforced) do not contain."""
    teacher_weights: Annotated[
        list[Factor] | None, Allowed("a list of numbers greater than 0, or null"), Refused
    ] = None
    """The relative weight of each teacher in the average of their softmaxes; null: all equal."""
    tile: Annotated[PositiveInt | Literal["auto"], Rounding] = "auto"
    """Side of the largest piece of the N x N logits that exists at once (2 x 4 x tile^2 bytes). A
    rank with fewer rows takes longer pieces of the same area. auto: by the batch and the cache."""

    matmul: Annotated[Matmul, Rounding] = "highest"
    """How GPUs multiply the features: in full fp32, or with factors rounded to 11 bits (TF32). On
    an H100 the loss is then 1.6 to 3.8 times as fast (docs/performance.md). docs/numerics.md has the error
    of the gradient. It makes no difference on CPUs."""

    @rule
    def _options_of_own_code(self) -> Messages:
        if self.options and not is_import_path(self.kind):
            yield (
                f"loss.options ({shown(self.options)}) need an import path as loss.kind (it is "
                f"{self.kind}); take them out"
            )

    @rule
    def _ring(self) -> Messages:
        if self.exchange == "ring" and self.kind not in ("info_nce", "sigmoid"):
            yield (
                f"loss.exchange (ring) needs loss.kind info_nce or sigmoid (it is {self.kind}): "
                "others gather the features; set loss.exchange=gather"
            )

    @rule
    def _groups(self) -> Messages:
        if self.groups is not None and self.kind not in ("info_nce", "sigmoid"):
            yield (
                f"loss.groups ({self.groups}) needs loss.kind info_nce or sigmoid (it is "
                f"{self.kind}): others read no groups; set loss.groups=null"
            )

    @rule
    def _positives_need_groups(self) -> Messages:
        if self.group_role == "positives" and self.groups is None:
            yield (
                "loss.group_role (positives) needs loss.groups (null): set loss.groups=caption, or "
                "loss.group_role=leave_out"
            )

    @rule
    def _positives_are_gathered(self) -> Messages:
        if self.group_role == "positives" and (self.kind, self.exchange) == ("info_nce", "ring"):
            yield (
                "loss.group_role (positives) of info_nce adds up the features of each group, and "
                "loss.exchange (ring) leaves them on their ranks; set loss.exchange=gather, or "
                "loss.group_role=leave_out"
            )

    @property
    def weights(self) -> dict[str, float]:
        """As `Objective.weights`."""
        return {
            "contrastive_loss": self.contrastive_weight,
            "caption_loss": self.caption_weight,
        }

    def build(self, teachers: Sequence[Teacher] = (), texts_per_image: int = 1) -> Objective:
        """The objective. Teachers go with `info_nce`, as Recipe has checked.

        texts_per_image: the positives of each image, as `data.texts_per_image`.

        UserError for an import path of neither an Objective nor a function as `function.py` has it,
        and for `loss.widths` or several texts of a loss with a memory.
        """
        from clip_train.losses.distillation import Distillation
        from clip_train.losses.function import FunctionLoss
        from clip_train.losses.info_nce import InfoNCE
        from clip_train.losses.memory_bank import MemoryBank
        from clip_train.losses.ring import RingInfoNCE
        from clip_train.losses.sigmoid import SigmoidLoss
        from clip_train.losses.tiles import AUTO_SIDE
        from clip_train.losses.views import matryoshka, over_texts
        from clip_train.task import Objective

        tile = AUTO_SIDE if self.tile == "auto" else self.tile
        objective: Objective = InfoNCE(tile, self.group_role)
        if teachers:
            objective = Distillation(teachers, tile, self.teacher_weights, self.distill_weights)
        elif self.kind == "memory_bank":
            objective = MemoryBank(
                self.bank_size, self.bank_warmup_steps, self.bank_mode, tile=tile
            )
        elif self.kind == "sigmoid":
            objective = SigmoidLoss(tile, self.exchange, self.group_role)
        elif self.exchange == "ring":
            objective = RingInfoNCE(tile=tile)
        elif is_import_path(self.kind):
            found = import_path("loss.kind", self.kind)
            if isinstance(found, Objective):
                if self.options:
                    raise UserError(
                        f"loss.options ({shown(self.options)}) are for a class or a function, and "
                        f"loss.kind ({self.kind}) is an object; take them out"
                    )
                objective = found
            elif isinstance(found, type):
                objective = call_imported("loss.kind", self.kind, self.options, base=Objective)
            else:
                objective = FunctionLoss.named(self.kind, found, self.options, tile)
        views = self.widths is not None or texts_per_image > 1
        if views and objective.keeps_state:
            raise UserError(
                f"loss.widths ({shown(self.widths)}) and data.texts_per_image ({texts_per_image}): "
                f"loss.kind ({self.kind}) keeps a state of one width and of one text from step to "
                "step; set loss.widths=null data.texts_per_image=1, or loss.kind=info_nce"
            )
        if texts_per_image > 1:
            objective = over_texts(texts_per_image, objective)
        if self.widths is not None:
            objective = matryoshka(self.widths, objective)
        objective.matmul, objective.weights = self.matmul, self.weights
        return objective
