"""From shards to batches whose order is a function of the seed and the step alone.

`TrainLoader` gives each rank its share of every global batch, `ValLoader` the validation set; `check_source`
looks at the data before a job starts. The order itself is explained, and made, in `lanes.py`.
"""

from clip_train.data.bad_log import BadSampleLog, epoch_of
from clip_train.data.check import SourceSummary, check_source
from clip_train.data.config import DataConfig, resolve_lanes
from clip_train.data.loader import TrainLoader, merge_cursors
from clip_train.data.shares import times_read
from clip_train.data.tokenizer import Tokenizer
from clip_train.data.transforms import EvalTransform, TrainTransform, decode_image
from clip_train.data.validation import ValBatch, ValLoader
from clip_train.data.writer import write_shards

__all__ = [
    "BadSampleLog",
    "DataConfig",
    "EvalTransform",
    "SourceSummary",
    "Tokenizer",
    "TrainLoader",
    "TrainTransform",
    "ValBatch",
    "ValLoader",
    "check_source",
    "decode_image",
    "epoch_of",
    "merge_cursors",
    "resolve_lanes",
    "times_read",
    "write_shards",
]
