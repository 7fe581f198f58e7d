"""From what a user calls a checkpoint (a run's folder, a URL, one attempt's folder, a marker) to where it is."""

from __future__ import annotations

from clip_train.checkpoint import layout, marks
from clip_train.checkpoint.layout import CommitRef
from clip_train.errors import CheckpointError, UserError
from clip_train.storage import is_remote, local_path, open_storage


def locate(path: str) -> tuple[str, CommitRef | None]:
    """(the checkpoints' root, which one in it if `path` says so). UserError where there are none."""
    return _locate_remote(path) if is_remote(path) else _locate_local(path)


def _locate_remote(url: str) -> tuple[str, CommitRef | None]:
    scheme, _, rest = url.rstrip("/").partition("://")
    parts = rest.split("/")
    for cut in range(len(parts), max(0, len(parts) - 4), -1):
        inside = "/".join(parts[cut:])
        ref = CommitRef.parse(inside) or layout.parse_prefix(inside)
        if inside and ref is None:
            continue
        root = f"{scheme}://{'/'.join(parts[:cut])}"
        for each in (root, f"{root}/checkpoints") if not inside else (root,):
            try:
                if marks.list_commits(open_storage(each)):
                    return each, ref
            except OSError as e:
                raise CheckpointError(f"checkpoint.resume ({url}) cannot be read: {e}") from e
    raise UserError(
        f"checkpoint.resume ({url}): holds no checkpoints; give a run's checkpoint.remote, or one checkpoint's "
        "commit/*.json or ckpt/*/* in it"
    )


def _locate_local(path: str) -> tuple[str, CommitRef | None]:
    here = local_path(path).absolute()
    if not here.exists():
        raise UserError(f"checkpoint.resume ({path}): no such path; use auto, must, never, or a path that exists")
    for folder in (here, here / "checkpoints"):
        if (folder / "commit").is_dir():
            return folder.resolve().as_posix(), None
    for folder in list(here.parents)[:3]:
        inside = here.relative_to(folder).as_posix()
        ref = CommitRef.parse(inside) or layout.parse_prefix(inside)
        if ref is not None and (folder / "commit").is_dir():
            return folder.resolve().as_posix(), ref
    raise UserError(
        f"checkpoint.resume ({path}): holds no checkpoints; give a run's folder, its checkpoints folder, "
        "or one checkpoint's commit/*.json or ckpt/*/* in it"
    )
