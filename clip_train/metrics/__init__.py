"""What a run reports while it trains (progress, sinks) and afterwards (report)."""

from clip_train.metrics.config import LogConfig
from clip_train.metrics.meters import StepRecord, StepTimer, StepTimes, batch_digest, peak_memory_bytes
from clip_train.metrics.progress import ProgressLine
from clip_train.metrics.report import write_report
from clip_train.metrics.sinks import JsonlSink, Sink, Sinks, TensorBoardSink, WandbSink, iter_jsonl, read_jsonl

__all__ = [
    "JsonlSink",
    "LogConfig",
    "ProgressLine",
    "Sink",
    "Sinks",
    "StepRecord",
    "StepTimer",
    "StepTimes",
    "TensorBoardSink",
    "WandbSink",
    "batch_digest",
    "iter_jsonl",
    "peak_memory_bytes",
    "read_jsonl",
    "write_report",
]
