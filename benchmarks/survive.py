"""Everything that ends a job, on a real Slurm with checkpoints on a real S3 server, and what becomes of the run.

Runs the scenarios of tests/slurm (root and apt are needed; scripts/setup_s3.sh for the S3 server) with twelve
preemptions instead of one, and keeps of each its job's log, attempts.jsonl, each attempt's log, metrics.jsonl and the
comparison with the undisturbed run. About 15 minutes on 2 cores. `--json benchmarks/results/survive.json` records it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, finish, parser

from tests.s3.localstack import LocalStack
from tests.slurm.evidence import KEEP, read_rows, tell_attempts

TARGETS = {
    "stories": "every scenario's attempts.jsonl tells what happened and who is to blame, as tests/slurm expects it",
    "losses": "of every run that is to finish, every step's loss is that of the undisturbed run, within 1e-5",
    "S3": "every checkpoint lies on the S3 server and is whole, and requeued attempts fetch theirs from there",
}
QUICK = "kill_of_a_rank"


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--keep",
        metavar="FOLDER",
        help="where the logs go (default: a new one under the temporary folder)",
    )
    arguments.add_argument("--preemptions", type=int, default=12)
    args = arguments.parse_args()
    if LocalStack.missing() is not None:
        print("no S3 server here: run scripts/setup_s3.sh")
        return 1
    folder = Path(args.keep or tempfile.mkdtemp(prefix="survive-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    line = [
        sys.executable,
        "-m",
        "pytest",
        "tests/slurm",
        "-m",
        "slurm",
        *(["-k", QUICK] if args.quick else []),
    ]
    environ = {
        **os.environ,
        KEEP: str(folder),
        "PREEMPTIONS": str(args.preemptions),
        "PYTHONPATH": str(ROOT),
    }
    status = subprocess.run(line, cwd=ROOT, env=environ, check=False).returncode
    rows = read_rows(folder)
    if not rows:
        print("no scenario ran: see above")
        return 1
    print(f"logs: {folder}")
    missed = [] if status == 0 else [f"pytest ended with status {status}"]
    missed += [
        f"{row['scenario']}: its checkpoints were not on S3"
        for row in rows
        if row["checkpoints"] == "disk"
    ]
    shown = [{**row, "attempts": tell_attempts(row["attempts"])} for row in rows]
    return finish("survive", shown, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
