"""From shards to batches: which samples are in which global batch is a function of the seed and the step alone.

`TrainLoader` gives each rank its share of every global batch, `ValLoader` the validation set; `check_source` looks at
the data before a job starts. `order.py` defines the order.
"""

from clip_train.data.config import DataConfig, SourceSummary, check_source, order_keys, resolve_streams
from clip_train.data.decode import EvalTransform, TrainTransform, decode_image
from clip_train.data.index import ResumedData, ShardIndex, index_of, resume_data
from clip_train.data.inspect import count_missing
from clip_train.data.invalid import InvalidLog, InvalidTable
from clip_train.data.loader import TrainLoader
from clip_train.data.order import times_read
from clip_train.data.tar import write_shards
from clip_train.data.tokenizer import Tokenizer
from clip_train.data.validation import ValBatch, ValLoader

__all__ = [
    "DataConfig",
    "EvalTransform",
    "InvalidLog",
    "InvalidTable",
    "ResumedData",
    "ShardIndex",
    "SourceSummary",
    "Tokenizer",
    "TrainLoader",
    "TrainTransform",
    "ValBatch",
    "ValLoader",
    "check_source",
    "count_missing",
    "decode_image",
    "index_of",
    "order_keys",
    "resolve_streams",
    "resume_data",
    "times_read",
    "write_shards",
]
