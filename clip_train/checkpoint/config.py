"""The recipe's `checkpoint` section, and whether the remote store that it names can be used."""

import contextlib
import errno
import re
import uuid
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from clip_train.checkpoint.commit import list_commits
from clip_train.checkpoint.manifest import CommitRef, parse_prefix
from clip_train.errors import CheckpointError, ClipTrainError, UserError
from clip_train.places import CACHES
from clip_train.settings import Messages, Place, Removed, Settings, is_switch, rule
from clip_train.storage.base import Storage
from clip_train.storage.errors import RefusedError
from clip_train.storage.local import LocalStorage
from clip_train.storage.redact import redact
from clip_train.storage.urls import STORES, is_remote, local_path, open_storage


class CheckpointConfig(Settings):
    """When and where to save, how many checkpoints to keep, and where to resume from."""

    removed: ClassVar = {
        "orphan_grace_minutes": Removed(
            instead="leave it out; files of saves that were never committed are removed after an "
            "hour",
            ignored=lambda value: value == 60.0,
        ),
        "takeover": Removed(
            instead="leave it out; a second start takes over by itself", ignored=is_switch
        ),
    }

    every_steps: int | None = Field(1000, ge=1)
    """Save after this many optimizer steps; null: never by steps. If the disk is still writing the
    last snapshot, the save follows as soon as that is done.
    """

    every_minutes: float | None = Field(None, gt=0, le=1e6)
    """Save this many minutes after the last save, by rank 0's clock; null: never by time."""

    remote: Place | None = Field(None, min_length=1)
    """Where checkpoints are uploaded to: `s3://bucket/prefix`, or a folder on another disk. It
    belongs to this run alone. null: they stay under `<run.dir>/checkpoints`. Credentials come
    from the usual environment or profile.
    """

    keep_last: int = Field(3, ge=1)
    """How many of the newest complete checkpoints stay; the one resumed from stays too."""

    keep_every: int | None = Field(None, ge=1)
    """Checkpoints at multiples of this many steps are kept forever."""

    keep_best: str | None = Field(None, min_length=1)
    """A metric of the evaluation (`zero_shot_top1`): the checkpoint with the highest value is kept.
    With a minus in front (`-image_to_text_median_rank`), the one with the lowest. Only evaluations
    at the step of a save count.
    """

    resume: Place = Field("auto", min_length=1)
    """`auto` (the newest complete checkpoint, local or remote, else a fresh start), `must` (fail
    rather than start fresh), `never`, or a path or URL: a run's folder, its checkpoints, or one
    checkpoint in it. If it is another run's, this run starts there. Once it has a checkpoint of its
    own, it continues from that.
    """

    allow_changed_recipe: bool = False
    """Resume even if the data, the model or the global batch has changed. The loss curve then
    changes too.
    """

    max_failed_saves: int = Field(3, ge=1)
    """The run stops after this many failed saves in a row. Before that, it tries again when the
    next save is due.
    """

    save_timeout_minutes: float = Field(60.0, gt=0, le=1e6)
    """A save that takes longer than this to be committed has failed."""

    grace_seconds: float = Field(240.0, ge=0, le=1e8)
    """How long to wait for the last save to be committed, at the end or after a stop request."""

    @rule
    def _names_a_bucket(self) -> Messages:
        if self.remote is None:
            return
        scheme = re.split("://|::", self.remote)[0].lower()
        if scheme in CACHES:
            yield (
                f"checkpoint.remote ({redact(self.remote)}): {scheme}:: is for reading; leave "
                f"{scheme}:: out"
            )
        elif scheme in STORES:
            try:
                open_storage(self.remote, client="obstore")  # asks for no other package
            except UserError as e:
                yield f"checkpoint.remote: {e}"


# -- the checkpoints at a path, as in `checkpoint.resume`


def locate(path: str, key: str | None = None) -> tuple[str, CommitRef | None]:
    """The root of the checkpoints at `path`, and the checkpoint if `path` names one (else None).

    key: of the recipe that has this path. UserError if there are no checkpoints; CheckpointError.
    """
    name = path if key is None else f"{key} ({path})"
    remote = is_remote(path)
    place = path.rstrip("/")
    if not remote:
        absolute = local_path(path).resolve()
        if not absolute.exists():
            remedy = "correct it" if key is None else "use auto, must, never, or a path that exists"
            raise UserError(f"{name}: no such path; {remedy}")
        place = absolute.as_posix()
    roots = [place, f"{place}/checkpoints"]
    ref = None
    match = re.fullmatch(r"(.+)/(commit/[^/]+|ckpt/[^/]+/[^/]+)", place)
    if match is not None:
        ref = CommitRef.parse(match[2]) or parse_prefix(match[2])
        if ref is not None:
            roots = [match[1]]
    for root in roots:
        try:
            if remote:
                has_commits = bool(list_commits(open_storage(root)))
            else:
                has_commits = Path(root, "commit").is_dir()
        except OSError as e:
            raise CheckpointError(f"{name} cannot be read: {e}") from e
        if has_commits:
            return root, ref
    raise UserError(
        f"{name} holds no checkpoints; give a run's folder, its checkpoints folder or "
        "checkpoint.remote, or one checkpoint's commit/*.json or ckpt/*/* in it"
    )


# -- requirements of the store, tested before the model is built

# errors of a local disk that another attempt does not change
_LASTING = (errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EROFS, errno.ENAMETOOLONG)
_IGNORES_CONDITIONS = (  # the remedy follows the semicolon
    "ignores If-None-Match (conditional writes), so two runs that start at the same moment may "
    "both take it for theirs. Checkpoints are still complete or do not exist, and a run that was "
    "started earlier stops at its next save; make sure that no two jobs use this "
    "checkpoint.remote at once"
)


_OPERATIONS = ("list", "write", "read", "delete")
# the permissions that these operations need, by the kind of store
_PERMISSIONS = {
    "s3": ("s3:ListBucket", "s3:PutObject", "s3:GetObject", "s3:DeleteObject"),
    "gs": ("storage.objects.list", "storage.objects.create", "storage.objects.get",
           "storage.objects.delete"),
    "az": ("Storage Blob Data Contributor",) * 4,
}  # fmt: skip
_ENDPOINTS = {"az": "AZURE_STORAGE_ENDPOINT", "gs": "GOOGLE_BASE_URL", "s3": "AWS_ENDPOINT_URL"}


def _kind(url: str) -> str:
    """The kind of store: s3 also for `s3a://` and `fsspec+s3://`."""
    scheme = url.partition("://")[0].lower().removeprefix("fsspec+")
    return "s3" if scheme == "s3a" else scheme


def preflight(storage: Storage) -> list[str]:
    """Try every operation that a run needs from its store, and remove the files made by the test.
    Returns warnings.

    UserError (a permission, a bucket, a clock) or CheckpointError (possibly temporary): the first
    operation that fails, and why.
    """
    folder = f"preflight/{uuid.uuid4().hex}"
    content = uuid.uuid4().hex.encode()
    file, once = f"{folder}/file", f"{folder}/once"
    warnings = []
    # for the message: what the store cannot do, and the permission that this needs
    permissions = _PERMISSIONS.get(_kind(storage.url), ("",) * len(_OPERATIONS))
    needs = dict(zip(_OPERATIONS, permissions, strict=True))
    doing, permission = "be listed", needs["list"]
    try:
        storage.list("commit")
        doing, permission = "be written to", needs["write"]
        storage.put_bytes(file, content)
        doing, permission = "be read", needs["read"]
        if storage.read_bytes(file) != content:
            raise CheckpointError("returns other bytes than were written")
        if file not in [entry.name for entry in storage.list(folder)]:
            raise CheckpointError("does not list a file that it has stored")
        doing, permission = "be written to conditionally (If-None-Match)", needs["write"]
        # two writers, only one of which may win: leases and commits depend on this
        if not storage.put_bytes(once, b"first", if_absent=True):
            raise CheckpointError(
                "refuses a conditional write (If-None-Match) to a name that is new"
            )
        if storage.put_bytes(once, b"second", if_absent=True):
            warnings.append(f"checkpoint.remote ({storage.url}) {_IGNORES_CONDITIONS}")
        doing, permission = "delete files (needed for retention)", needs["delete"]
        for name in (file, once):
            storage.delete(name)
            if storage.exists(name):
                raise CheckpointError(f"still has {name}, which was deleted")
    except (OSError, ClipTrainError) as e:
        raise _preflight_error(storage.url, doing, permission, e) from e
    finally:
        with contextlib.suppress(OSError, ClipTrainError):
            if doing != "be listed":
                storage.delete_tree(folder)
            if isinstance(storage, LocalStorage):  # fails if another process tests the store now
                storage.path(folder).parent.rmdir()
    return warnings


def _preflight_error(
    url: str, doing: str, permission: str, e: OSError | ClipTrainError
) -> ClipTrainError:
    """The error and its remedy. A server that is only busy is not the user's mistake."""
    kind: type[ClipTrainError] = UserError
    result = f"cannot {doing}: {e}"
    remedy = "give s3://bucket/prefix, or a folder"
    if isinstance(e, CheckpointError):
        kind, result = CheckpointError, str(e)
        remedy = "use another server, or ask its administrators"
    elif isinstance(e, OSError):
        result = f"cannot {doing}: {str(e.strerror or e).removeprefix(f'{url}: ')}"
        head, _, advice = result.rpartition("; ")  # ObjectStorage ends its refusals with the remedy
        lasts = isinstance(e, PermissionError | RefusedError) or e.errno in _LASTING
        if not lasts:
            kind = CheckpointError
            remedy = "try again, and if it stays so check the network and the URL"
            setting = _ENDPOINTS.get(_kind(url))
            if setting is not None:
                remedy = f"try again, and if it stays so check the network, the URL and {setting}"
        elif head:
            result = head
            remedy = advice
            if permission and "the right" in advice:
                remedy = f"{advice} ({permission})"
        else:
            remedy = "correct its permissions, or choose another place"
    return kind(f"checkpoint.remote ({url}) {result}; {remedy}")
