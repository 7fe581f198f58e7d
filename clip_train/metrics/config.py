"""The recipe's `log` section."""

from typing import Annotated, ClassVar

from pydantic import Field

from clip_train.callbacks import Callback
from clip_train.errors import UserError
from clip_train.settings import Allowed, ImportPath, Removed, Settings, import_path, is_installed


class LogConfig(Settings):
    """The terminal output and the records. `metrics.jsonl` and `report.html` are always written."""

    removed: ClassVar = {
        "every_steps": Removed(
            instead="leave it out; a progress line is logged every 10 seconds",
            ignored=lambda value: isinstance(value, int),
        ),
        "memory_snapshot": Removed(
            instead="call torch.cuda.memory._record_memory_history() in a callback of your own "
            "(log.callbacks), and _dump_snapshot in its on_error",
            ignored=lambda value: value is False,
        ),
        "strict_callbacks": Removed(
            instead="leave it out; a callback ends the run if it raises an error of "
            "clip_train.errors, and any other error is a warning",
            ignored=lambda value: value is False,
        ),
    }
    progress: bool = True
    """A progress bar in a terminal; elsewhere a line every 10 seconds."""

    tensorboard: bool = True
    """Write TensorBoard's files to `events/` in the run's folder."""

    wandb: bool = False
    """Send the metrics to Weights & Biases; needs `pip install wandb`."""

    wandb_project: str | None = None
    """The project there; null: `clip-train`."""

    batch_digest: bool = False
    """Record a sha256 over the sorted (shard, key) pairs of each global batch. Two batches with equal
    digests have the same samples."""

    profile_steps: Annotated[
        list[Annotated[int, Field(ge=1)]] | None,
        Field(min_length=2, max_length=2),
        Allowed("a list of 2 steps from 1 on, or null", example="'[100, 105]'"),
    ] = None
    """Trace these steps, such as [100, 105], both included: `profile/` in the run's folder then has
    a trace of each rank (for ui.perfetto.dev), and a table of its largest operators with their
    memory. Traced steps are slower."""

    callbacks: Annotated[
        list[ImportPath], Allowed("a list of import paths", example="'[my_package.probes.Probe]'")
    ] = Field([])
    """Callbacks of your own: import paths of subclasses of `clip_train.callbacks.Callback`, which
    are called after a step, a save and an evaluation (docs/extending.md). An error of
    `clip_train.errors` in one ends the run. After any other error, the run continues, and VERDICT
    lists it."""

    notify: str | None = None
    """A shell command that runs at each verdict: VERDICT, RUN_NAME, RUN_DIR, STEP and REASON are in
    its environment."""

    def mistakes_here(self) -> list[str]:
        """Packages that are not installed on this machine, and callbacks that cannot be
        imported."""
        names = [name for name in ("tensorboard", "wandb") if getattr(self, name)]
        mistakes = [
            f"log.{name} (true): {name} is not installed; pip install {name}, or set "
            f"log.{name}=false"
            for name in names
            if not is_installed(name)
        ]
        for path in self.callbacks:
            try:
                import_path("log.callbacks", path, Callback)
            except UserError as e:
                mistakes.append(str(e))
        return mistakes
