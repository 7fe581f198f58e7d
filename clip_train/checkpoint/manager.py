"""What the trainer calls: is a save due, save, resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import layout
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.layout import CommitRef, FileEntry
from clip_train.checkpoint.reader import FragmentReader
from clip_train.checkpoint.resume import Resolution, Skipped, list_commits, resolve
from clip_train.checkpoint.retention import apply_retention
from clip_train.checkpoint.writer import Snapshot, check_space, commit, free_bytes, take_snapshot, write_rank
from clip_train.errors import CheckpointError, UserError
from clip_train.protocols import Fragment
from clip_train.storage import LocalStorage, is_remote, local_path

logger = logging.getLogger(__name__)


class LastGood(NamedTuple):
    """The checkpoint that a failing run can go back to."""

    step: int
    path: str


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to continue from."""

    step: int
    state: dict[str, Any]  # as given to `save`; dicts with integer keys have them back, tuples are lists
    reader: FragmentReader
    rank_tensors: dict[str, Tensor] | None  # this rank's; None if the number of ranks has changed
    world_size: int  # of the run that wrote it
    path: Path
    skipped: list[Skipped] = field(default_factory=list)  # newer ones that are not whole, and why

    def describe(self) -> str:
        """One line, and one more per checkpoint that was passed over."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        lines = [f"resuming from step {self.step} ({self.path}, written by {ranks})"]
        return "\n".join(lines + [f"  passed over {each}" for each in self.skipped])


class CheckpointManager:
    """Saves and resumes one run's checkpoints. All ranks make the same calls in the same order.

    folder: `<run.dir>/checkpoints`, on a disk that all ranks share. log: told of failed saves and of
    damaged checkpoints, on rank 0.
    """

    def __init__(
        self, config: CheckpointConfig, folder: Path | str, *, log: Callable[[str], None] | None = None
    ) -> None:
        self.config = config
        self.folder = Path(folder).absolute()
        self.storage = LocalStorage(self.folder)
        self.staging = self.folder / "tmp"
        self._log = log or logger.warning
        self._last_good: LastGood | None = None
        self._epoch: int | None = None  # known once `resume` or `save` has looked
        self._saved: CommitRef | None = None  # the newest commit of this process, or the one resumed from
        self._protect: set[CommitRef] = set()
        self._damaged: set[CommitRef] = set()
        self._failures = 0  # saves in a row
        self._clock_started = time.monotonic()  # seconds; of the last save
        self._clock_step: int | None = None  # step at which the clock started
        self._next_look = 0  # step at which the clock is looked at again

    @property
    def last_good(self) -> LastGood | None:
        """The newest checkpoint that this process has committed or resumed from."""
        return self._last_good

    # -- when

    def due(self, step: int) -> bool:
        """Whether to save after `step` (counted from 1): the same answer on all ranks, once per step."""
        by_steps = self.config.every_steps is not None and step > 0 and step % self.config.every_steps == 0
        return by_steps or self._due_by_time(step)

    def _due_by_time(self, step: int) -> bool:
        """Rank 0's clock decides. It also says when to ask again, so that most steps cost no message."""
        if self.config.every_minutes is None:
            return False
        if self._clock_step is None:
            self._clock_step = step - 1
        if step < self._next_look:
            return False
        passed = time.monotonic() - self._clock_started
        left = 60 * self.config.every_minutes - passed  # seconds
        # half of the steps that fit into the time left at the present rate, lest steps become slower
        steps_left = left * (step - self._clock_step) / max(passed, 1e-9)
        due, self._next_look = dist.broadcast_object((left <= 0, step + max(1, int(min(steps_left, 2e6) / 2))))
        return due

    # -- save

    def save(
        self,
        step: int,
        fragments: Iterable[Fragment],
        rank_tensors: dict[str, Tensor],
        state: dict[str, Any],
        shared_tensors: dict[str, Tensor] | None = None,
    ) -> bool:
        """Make a checkpoint of the run after `step`: all ranks' fragments and tensors, and rank 0's `state`.

        shared_tensors: the same on all ranks; rank 0's are written.

        True: it is committed. False: it is not, on any rank; rank 0 has logged why and training may go on.
        CheckpointError after `max_failed_saves` failures in a row. A step that is saved already is not again.
        """
        if self._saved is not None and self._saved.step == step:
            return True
        try:
            ref, prefix = self._save(step, fragments, rank_tensors, state, shared_tensors)
        except CheckpointError as e:
            self._failures += 1
            message = f"checkpoint of step {step} failed ({self._failures} in a row): {e}"
            if self._failures >= self.config.max_failed_saves:
                raise CheckpointError(f"{message}; {self._fallback()}") from e
            if dist.is_main():
                self._log(f"{message}; training goes on, {self._fallback()}")
            return False
        finally:
            self._clock_started, self._clock_step, self._next_look = time.monotonic(), step, 0
        self._failures = 0
        self._saved = ref
        self._last_good = LastGood(step, str(self.folder / prefix))
        if dist.is_main():
            self._retain()
        return True

    def _fallback(self) -> str:
        return f"the last good one is {self.last_good.path}" if self.last_good else "there is no good one yet"

    def _save(
        self,
        step: int,
        fragments: Iterable[Fragment],
        rank_tensors: dict[str, Tensor],
        state: dict[str, Any],
        shared_tensors: dict[str, Tensor] | None,
    ) -> tuple[CommitRef, str]:
        """CheckpointError on all ranks if anything fails on any."""
        rank, world_size = dist.rank(), dist.world_size()
        snapshot: Snapshot | None = None
        entries: list[FileEntry] = []

        def prepare() -> tuple[str, int, int, int]:
            nonlocal snapshot
            epoch = self._writer_epoch() if rank == 0 else 0
            snapshot = take_snapshot(step, rank, fragments, rank_tensors, state if rank == 0 else {}, shared_tensors)
            return layout.new_prefix(epoch, step), epoch, snapshot.num_bytes, free_bytes(self.folder)

        def write() -> list[FileEntry]:
            assert snapshot is not None
            return write_rank(self.storage, self.staging, prefix, snapshot)

        plans = self._on_all(prepare)
        prefix, epoch, _, _ = plans[0]
        self._epoch = epoch
        # all ranks share the disk: the sum must fit where the least is free
        check_space(self.folder, sum(plan[2] for plan in plans), min(plan[3] for plan in plans))
        for written in self._on_all(write):
            entries += written

        def publish() -> None:
            if rank == 0:
                assert snapshot is not None
                commit(self.storage, prefix, snapshot, epoch=epoch, world_size=world_size, files=entries)

        self._on_all(publish)
        return CommitRef(epoch, step), prefix

    def _on_all(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on all ranks and give all results to all; one CheckpointError for all if any fails."""
        result, error = None, None
        try:
            result = action()
        except Exception as e:
            error = str(e) if isinstance(e, CheckpointError) else f"{type(e).__name__}: {e}"
            logger.debug("saving failed on this rank", exc_info=True)
        outcomes = dist.gather_objects((result, error))
        errors = [f"rank {rank}: {each}" for rank, (_, each) in enumerate(outcomes) if each is not None]
        if errors:
            more = f" (and {len(errors) - 3} more ranks)" if len(errors) > 3 else ""
            raise CheckpointError("; ".join(errors[:3]) + more)
        return [each for each, _ in outcomes]

    def _writer_epoch(self) -> int:
        """Rank 0 only. A run that saves without having resumed leaves all there is behind."""
        if self._epoch is None:
            commits = list_commits(self.storage)
            self._epoch = commits[0].epoch + 1 if commits else 0
        return self._epoch

    def _retain(self) -> None:
        try:
            apply_retention(
                self.storage,
                self.staging,
                self.config.keep_last,
                protect=self._protect,
                damaged=self._damaged,
            )
        except (OSError, CheckpointError) as e:
            self._log(f"old checkpoints under {self.folder} could not be removed: {type(e).__name__}: {e}")

    # -- resume

    def resume(self) -> Resumed | None:
        """What `checkpoint.resume` asks for; None for a fresh start. All ranks get the same checkpoint.

        CheckpointError when there must be one and none is whole, or where one cannot be read. UserError for
        a path that holds no checkpoints.
        """
        mode = self.config.resume
        if mode == "never":
            return None
        elsewhere = None if mode in ("auto", "must") else dist.on_main(lambda: _locate(mode))
        folder, only = elsewhere or (self.folder, None)
        storage = LocalStorage(folder)
        answer = resolve(storage, only)
        own = folder.resolve() == self.folder.resolve()
        if own:
            self._leave_behind(answer)
        if answer.found is None:
            self._nothing_found(mode, folder, answer)
            return None

        found = answer.found
        path = folder / found.commit.prefix
        same_world = found.manifest.world_size == dist.world_size()

        def read() -> tuple[FragmentReader, dict[str, Tensor] | None]:
            reader = FragmentReader(path, [entry.name for entry in found.manifest.files])
            return reader, reader.rank_tensors(dist.rank()) if same_world else None

        reader, rank_tensors = dist.agreed(read)
        if own:
            self._saved = found.commit.ref
            self._protect = {found.commit.ref}
        self._last_good = LastGood(found.manifest.step, str(path))
        return Resumed(
            step=found.manifest.step,
            state=found.manifest.state,
            reader=reader,
            rank_tensors=rank_tensors,
            world_size=found.manifest.world_size,
            path=path,
            skipped=answer.skipped,
        )

    def _leave_behind(self, answer: Resolution) -> None:
        """Stay in the epoch of the newest commit if that is the one to continue, else open the next."""
        self._damaged = {each.ref for each in answer.skipped}
        if answer.commits:
            newest = answer.commits[0]
            goes_on = answer.found is not None and answer.found.commit.ref == newest
            self._epoch = newest.epoch if goes_on else newest.epoch + 1

    def _nothing_found(self, mode: str, folder: Path, answer: Resolution) -> None:
        reasons = "".join(f"\n  {each}" for each in answer.skipped)
        what = f"none of the checkpoints under {folder} is whole:{reasons}" if reasons else ""
        if mode != "auto":
            remedy = "set checkpoint.resume to auto to start fresh" if mode == "must" else "choose another"
            raise CheckpointError(f"{what or f'there is no checkpoint under {folder}'}\n{remedy}")
        if what and dist.is_main():
            self._log(f"{what}\nSTARTING FRESH, from step 0")


def _locate(path: str) -> tuple[Path, CommitRef | None]:
    """The checkpoints' folder that `checkpoint.resume: path` means, and which one in it if it says so."""
    if is_remote(path):
        raise UserError(f"checkpoint.resume ({path}): only a local path can be resumed from so far")
    here = local_path(path).absolute()
    if not here.exists():
        raise UserError(f"checkpoint.resume ({path}): no such path; use auto, must, never, or a path that exists")
    for folder in (here, here / "checkpoints"):
        if (folder / "commit").is_dir():
            return folder, None
    for folder in list(here.parents)[:3]:
        inside = here.relative_to(folder).as_posix()
        ref = CommitRef.parse(inside) or layout.parse_prefix(inside)
        if ref is not None and (folder / "commit").is_dir():
            return folder, ref
    raise UserError(
        f"checkpoint.resume ({path}): holds no checkpoints; give a run's folder, its checkpoints folder, "
        "or one checkpoint's commit/*.json or ckpt/*/* in it"
    )
