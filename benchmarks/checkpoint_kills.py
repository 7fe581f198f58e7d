"""Kill a process that saves to a store, at random moments, and see whether anything committed is ever lost.

`checkpoint_storm.py` kills whole trainings, which takes minutes a kill. Here the process only saves, so that many
stores can be tried: a folder; a real S3 server through obstore and s3fs (LocalStack, from scripts/setup_s3.sh);
Azurite, from scripts/setup_clouds.sh; tests/clouds/gcs_server.py; an sshd. Process and checkpoint writer get SIGKILL at
a random moment of a save, or between two. Half of the lives begin on an empty disk. After every kill the store is read
by code that is not the package's. With `--json FILE`, rows that FILE has of other stores stay.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, parser, rows_of_others

from tests.s3.kills import kill_again_and_again
from tests.s3.places import STORES, missing, place

TARGETS = {
    "resumed": "each life resumes from the newest commit on disk and in the store",
    "committed": "a step whose commit was reported is in the store after the kill; every commit is whole",
    "left over": "nothing in the store but what a commit names, after the last save",
}


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--kills", type=int, default=10, help="of each store (default: 10)")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--store", nargs="+", choices=STORES, default=STORES)
    args = arguments.parse_args()
    missed = [f"{store}: {why}" for store in args.store if (why := missing(store))]
    status = 1
    for store in args.store:
        if missing(store):
            continue
        with tempfile.TemporaryDirectory() as folder, place(store, Path(folder)) as at:
            kills = 2 if args.quick else args.kills
            result = kill_again_and_again(at.bucket, Path(folder), kills, f"{args.seed} {store}")
        missed += [f"{store}: {each}" for each in result.wrong]
        row = {"store": store, **dataclasses.asdict(result), "wrong": len(result.wrong)}
        rows: list[dict[str, Any]] = [*rows_of_others(args.json, "store", [store]), row]
        # after each store, in case that a later one is interrupted
        status = finish("checkpoint_kills", rows, TARGETS, missed, args)
    return status


if __name__ == "__main__":
    sys.exit(main())
