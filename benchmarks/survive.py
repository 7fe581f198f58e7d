"""Everything that ends a job, on a real Slurm with checkpoints on a real S3 server, and what becomes of the run.

Runs the scenarios of tests/slurm (root and apt are needed; scripts/setup_s3.sh for the S3 server) with twelve
preemptions instead of one, and keeps of each its job's log, attempts.jsonl, each attempt's log, metrics.jsonl and the
comparison with the undisturbed run. `--docs docs/slurm.md` renews the table there. About 15 minutes on 2 cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, commit, environment, finish, parser

from tests.s3.localstack import LocalStack
from tests.slurm.evidence import KEEP, excerpt, read_rows, table, tell_attempts

TARGETS = {
    "stories": "every scenario's attempts.jsonl tells what happened and who is to blame, as tests/slurm expects it",
    "losses": "of every run that is to finish, every step's loss is that of the undisturbed run, within 1e-5",
    "S3": "every checkpoint lies on the S3 server and is whole, and requeued attempts fetch theirs from there",
}
QUICK = "kill_of_a_rank"
TELLING = {"time limits": "time_limits", "a bad node": "bad_node"}


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--keep",
        metavar="FOLDER",
        help="where the logs go (default: a new one under the temporary folder)",
    )
    arguments.add_argument("--preemptions", type=int, default=12)
    arguments.add_argument(
        "--docs", metavar="FILE", help="renew the table between <!-- survive --> marks there"
    )
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
    if args.docs:
        renew(Path(args.docs), folder)
    missed = [] if status == 0 else [f"pytest ended with status {status}"]
    missed += [
        f"{row['scenario']}: its checkpoints were not on S3"
        for row in rows
        if row["checkpoints"] == "disk"
    ]
    shown = [{**row, "attempts": tell_attempts(row["attempts"])} for row in rows]
    return finish("survive", shown, TARGETS, missed, args)


def renew(file: Path, folder: Path) -> None:
    """The table and two stories, from this run."""
    where = environment()
    version = subprocess.run(
        ["slurmctld", "-V"], capture_output=True, text=True, check=False
    ).stdout.strip()
    text = [
        f"{where['date']}, {version}, {where['device']}, Python {where['python']}, torch {where['torch']}, DeepSpeed "
        f"{where['deepspeed']}, commit {commit()}; all from one run:\n",
        table(read_rows(folder)),
    ]
    for what, name in TELLING.items():
        found = next(iter(folder.glob(f"*{name}*/attempts.jsonl")), None)
        if found is not None:
            text.append(f"`attempts.jsonl` of {what}, without times and job numbers:\n")
            text.append(f"```\n{excerpt(found.read_text())}\n```\n")
    block = f"<!-- survive -->\n{chr(10).join(text)}<!-- /survive -->"
    content, count = re.subn(
        r"<!-- survive -->.*<!-- /survive -->", lambda _: block, file.read_text(), flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{file} has no <!-- survive --> ... <!-- /survive -->")
    file.write_text(content)


if __name__ == "__main__":
    sys.exit(main())
