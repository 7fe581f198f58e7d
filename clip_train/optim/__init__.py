"""Which parameters decay, how the learning rate moves, and which torch optimizer does the work."""

from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer, decay_groups
from clip_train.optim.schedule import ScheduleConfig, learning_rate

__all__ = ["OptimConfig", "ScheduleConfig", "build_optimizer", "decay_groups", "learning_rate"]
