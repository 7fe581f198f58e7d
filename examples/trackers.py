"""Callbacks that send a run's numbers to MLflow or Trackio, for `log.callbacks`.

    pip install mlflow-skinny
    MLFLOW_TRACKING_URI=http://server:5000 PYTHONPATH=. clip-train train recipes/demo_shapes.yaml \\
        run.name=tracked "log.callbacks=[examples.trackers.MLflow]"

A tracker that fails is a warning, and the run continues (docs/extending.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from clip_train import dist
from clip_train.callbacks import Callback


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if isinstance(value, (int, float))}


class MLflow(Callback):
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where. MLFLOW_RUN_ID continues a run."""

    def __init__(self) -> None:
        if dist.is_main():
            import mlflow

            self.mlflow = mlflow
            mlflow.start_run()

    def after_step(self, record, keys, invalid) -> None:
        self.after_evaluate(record)

    def after_evaluate(self, record) -> None:
        if dist.is_main():  # MLflow allows no @ in a name; a slow server does not hold up a step
            named = {name.replace("@", "_at_"): x for name, x in numbers(record).items()}
            self.mlflow.log_metrics(named, step=record["step"], synchronous=False)

    def close(self) -> None:
        if dist.is_main():
            self.mlflow.end_run()


class Trackio(Callback):
    """TRACKIO_PROJECT names the project, TRACKIO_NAME the run, which is continued if it exists."""

    def __init__(self) -> None:
        if dist.is_main():
            import trackio

            self.trackio = trackio
            project = os.environ.get("TRACKIO_PROJECT", "clip-train")
            trackio.init(project, name=os.environ.get("TRACKIO_NAME"), resume="allow")

    def after_step(self, record, keys, invalid) -> None:
        self.after_evaluate(record)

    def after_evaluate(self, record) -> None:
        if dist.is_main():
            self.trackio.log(numbers(record), step=record["step"])

    def close(self) -> None:
        if dist.is_main():
            self.trackio.finish()
