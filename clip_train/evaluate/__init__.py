"""Zero-shot classification and retrieval on the validation set, on any number of ranks."""

from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.loop import EvaluationBatch, evaluate
from clip_train.evaluate.zero_shot import ZeroShotClasses

__all__ = ["EvaluateConfig", "EvaluationBatch", "ZeroShotClasses", "evaluate"]
