"""How many samples an epoch has, as the index beside the shards says. Without torch."""

from clip_train.data.config import existing
from clip_train.data.index import index_of
from clip_train.errors import UserError
from launcher.config.recipe import RunConfig, check_config


def with_samples(config: RunConfig) -> RunConfig:
    """With data.num_samples as it is beside the shards, where run.epochs needs it and nobody gave
    it. UserError.
    """
    data = config.data
    if config.run.epochs is None or data.num_samples is not None:
        return config
    counted = None
    if data.train_weights is None and not data.resampled:  # else no epoch has each sample once
        counted = index_of(data.train, data.verify, config.storage).num_samples
        if counted is None:
            existing(data.train, "data.train")  # shards that are missing: the clearer error
    if counted is None:
        raise UserError(
            f"run.epochs ({config.run.epochs}) needs data.num_samples, the samples in one epoch, "
            "or shards with an index (`clip-train index`); or give run.steps"
        )
    raw = config.model_dump(exclude_unset=True)
    raw["data"]["num_samples"] = counted
    return check_config(raw, "the recipe")
