"""What the system allows this process to have."""

from __future__ import annotations

import contextlib
import resource

OPEN_FILES = 65536


def raise_open_files() -> None:
    """As many as this process may have: who holds the store, and rank 0, hold a socket for each rank.

    The soft limit is usually 1024, and Slurm brings it along from the shell that submitted. Not above OPEN_FILES: where
    the hard limit is 2^30, as in containers, programs that go through all possible files take minutes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
