"""The `optim` section of the recipe."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat

from clip_train.settings import (
    IMPORT_PATH,
    Allowed,
    Messages,
    Refused,
    Settings,
    is_import_path,
    rule,
    shown,
)

if TYPE_CHECKING:
    from clip_train.engines.base import Engine


class OptimConfig(Settings):
    """The optimizer. The defaults are OpenCLIP's for a ViT."""

    name: Annotated[
        str,
        Allowed("adamw, sgd, muon or the import path of a class, such as torch.optim.RMSprop"),
        Refused,
    ] = Field("adamw", pattern=rf"^(adamw|sgd|muon|{IMPORT_PATH})$")
    """adamw for training; sgd for checking gradients (Adam hides their scale). muon
    updates the blocks' matrices, AdamW the rest (docs/fine_tuning.md). Any other optimizer by its
    import path, such as lion_pytorch.Lion, if its state is `step` and tensors of a parameter's
    shape."""
    options: dict[str, Any] = Field({})
    """For an import path: the optimizer's arguments beside the parameters and lr."""
    lr: PositiveFloat = 5e-4
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.2
    """Decoupled; on matrices and embeddings only (OpenCLIP's groups)."""
    no_decay: list[str] = Field([])
    """Additional parameters without weight decay, by patterns that match their names, such as
    ["*embedding*"]."""
    lr_multipliers: Annotated[
        dict[str, PositiveFloat],
        Allowed("patterns over parameters' names, each with a factor greater than 0"),
    ] = Field({})
    """Factors of the learning rate by patterns over parameters' names, such as {"visual.*": 0.1};
    the first that matches counts."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """The learning rate of each layer of a tower, as a multiple of the rate of the layer above it
    (BEiT, arXiv 2106.08254). The projection and the norm below it have the full rate, the last
    block has this factor once, and the embeddings have the lowest rate."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """The momentum of sgd."""
    grad_clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights in fp32 with this decay, such as 0.9999.
    Evaluations report it as ema_...; `clip-train evaluate` and `export` use it with --ema. null:
    none."""
    ema_warmup: bool = False
    """Make the average forget the initial weights: at step t the decay is at most 1 - t^(-2/3)
    (timm's --model-ema-warmup)."""

    def apply_to(self, engine: "Engine") -> None:
        """Give an engine the rules that follow each update. Call it before weights are loaded."""
        from clip_train.engines.base import MovingAverage  # late: it imports torch

        if self.ema_decay is not None:
            engine.ema = MovingAverage(self.ema_decay, self.ema_warmup)

    @rule
    def _warmup_of_an_average(self) -> Messages:
        if self.ema_warmup and self.ema_decay is None:
            yield (
                "optim.ema_warmup (true) needs optim.ema_decay: set optim.ema_decay=0.9999 as well"
            )

    @rule
    def _options_of_own_code(self) -> Messages:
        if self.options and not is_import_path(self.name):
            yield (
                f"optim.options ({shown(self.options)}) go with an optim.name that is an import "
                f"path (it is {self.name}, whose keys are beta1, beta2, eps, momentum); take them "
                "out"
            )
