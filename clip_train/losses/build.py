"""From the `loss` section to the objective."""

from collections.abc import Sequence

from clip_train.errors import UserError
from clip_train.losses.config import LossConfig
from clip_train.losses.distillation import Distillation, Teacher
from clip_train.losses.function import FunctionLoss
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.memory_bank import MemoryBank
from clip_train.losses.ring import RingInfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.losses.tiles import AUTO_SIDE
from clip_train.losses.views import matryoshka, over_texts
from clip_train.settings import call_imported, import_path, is_import_path, shown
from clip_train.task import Objective

# Methods of a loss that has something to remember from step to step.
STATE = ("after_step", "state_dict", "load_state_dict")


def keeps_state(objective: Objective) -> bool:
    """Whether it keeps something from step to step, by any of the methods for that."""
    return any(getattr(type(objective), name) is not getattr(Objective, name) for name in STATE)


def build_loss(
    config: LossConfig, teachers: Sequence[Teacher] = (), texts_per_image: int = 1
) -> Objective:
    """The objective of the recipe. Teachers go with `info_nce`, as RunConfig has checked.

    texts_per_image: the positives of each image, as `data.texts_per_image`.

    UserError for an import path of neither an Objective nor a function as `function.py` has it, and
    for `loss.widths` or several texts of a loss with a memory.
    """
    tile = AUTO_SIDE if config.tile == "auto" else config.tile
    objective: Objective = InfoNCE(tile, config.group_role)
    if teachers:
        objective = Distillation(teachers, tile, config.teacher_weights, config.distill_weights)
    elif config.kind == "memory_bank":
        objective = MemoryBank(
            config.bank_size, config.bank_warmup_steps, config.bank_mode, tile=tile
        )
    elif config.kind == "sigmoid":
        objective = SigmoidLoss(tile, config.exchange, config.group_role)
    elif config.exchange == "ring":
        objective = RingInfoNCE(tile=tile)
    elif is_import_path(config.kind):
        found = import_path("loss.kind", config.kind)
        if isinstance(found, type):
            objective = call_imported("loss.kind", config.kind, config.options, base=Objective)
        else:
            objective = FunctionLoss.named(config.kind, found, config.options, tile)
    views = config.widths is not None or texts_per_image > 1
    if views and keeps_state(objective):
        raise UserError(
            f"loss.widths ({shown(config.widths)}) and data.texts_per_image ({texts_per_image}): "
            f"loss.kind ({config.kind}) keeps a state of one width and of one text from step to "
            "step; set loss.widths=null data.texts_per_image=1, or loss.kind=info_nce"
        )
    if texts_per_image > 1:
        objective = over_texts(texts_per_image, objective)
    if config.widths is not None:
        objective = matryoshka(config.widths, objective)
    objective.matmul, objective.weights = config.matmul, config.weights
    return objective
