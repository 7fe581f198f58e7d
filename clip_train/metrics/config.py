"""The recipe's `log` section."""

from importlib.util import find_spec

from pydantic import Field

from clip_train.settings import Settings


class LogConfig(Settings):
    """What is shown and recorded. `metrics.jsonl` and `report.html` are always written."""

    progress: bool = True
    """A progress bar in a terminal; elsewhere a line every 10 seconds."""

    every_steps: int = Field(1, ge=1)
    """The line of progress comes after so many steps at the earliest; every step is recorded all
    the same."""

    tensorboard: bool = True
    """Write TensorBoard's files to `events/` in the run's folder."""

    wandb: bool = False
    """Send the metrics to Weights & Biases; needs `pip install wandb`."""

    wandb_project: str | None = None
    """The project there; null: `clip-train`."""

    batch_digest: bool = False
    """Record the sha256 of each global batch's sorted sample keys: equal digests, equal batches."""

    notify: str | None = None
    """A shell command that runs at each verdict: VERDICT, RUN_NAME, RUN_DIR, STEP and REASON are in
    its environment."""

    def mistakes_here(self) -> list[str]:
        """The packages that this machine lacks."""
        wanted = [name for name in ("tensorboard", "wandb") if getattr(self, name)]
        return [
            f"log.{name} (true): {name} is not installed; pip install {name}, or set "
            f"log.{name}=false"
            for name in wanted
            if find_spec(name) is None
        ]
