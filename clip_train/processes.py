"""Processes by `multiprocessing`'s fork server, wherever temporary files are."""

import multiprocessing
import os
import shutil
import tempfile
from multiprocessing import util
from multiprocessing.context import ForkServerContext

from clip_train.errors import RankError

# A socket's path has at most 107 bytes; `multiprocessing` adds /pymp-XXXXXXXX/listener-XXXXXXXX.
LONGEST_FOLDER = 107 - 32
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", f"/run/user/{os.getuid()}")


def fork_server() -> ForkServerContext:
    """The context for processes that must not be forked from this one: libraries' threads, clients
    of stores and CUDA do not survive it.

    Its sockets are in TMPDIR, or in a short folder if TMPDIR's path is too long for a socket.
    RankError if there is none.
    """
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    # the folder exists already if something else of `multiprocessing` needed one
    parent = os.path.dirname(config.get("tempdir") or "") or tempfile.gettempdir()
    if len(os.fsencode(parent)) > LONGEST_FOLDER:
        config["tempdir"] = folder = _short_folder()
        util.Finalize(None, shutil.rmtree, args=[folder, True], exitpriority=-100)
    return multiprocessing.get_context("forkserver")


def _short_folder() -> str:
    for place in SHORT_FOLDERS:
        try:
            return tempfile.mkdtemp(prefix="pymp-", dir=place)
        except OSError:
            continue
    there = tempfile.gettempdir()
    raise RankError(
        f"TMPDIR ({there}) has {len(os.fsencode(there))} bytes, and a socket's path allows "
        f"{LONGEST_FOLDER}; no file can be written to {', '.join(SHORT_FOLDERS)} either: set TMPDIR "
        "to a shorter path"
    )
