"""What a run on the cluster has to show: its attempts' story, and losses that are those of the
undisturbed run.

With $CLIP_TRAIN_KEEP_LOGS, a folder, all of it is kept there: one folder for each scenario, and
`survive.md`, a table.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.launcher.conftest import metrics
from tests.slurm.cluster import Job

KEEP = "CLIP_TRAIN_KEEP_LOGS"
RESUMED = re.compile(r"resuming from step (\d+)\n +source +(\S+) \((.*)\)$", re.MULTILINE)
ANY = "*"  # in an expected story: whatever it was
NODES = {"2x1": 2, "1x2": 1}


@dataclass(frozen=True)
class Told:
    """One attempt, as `attempts.jsonl` and its own log tell it."""

    begin: dict
    end: dict
    resumed: int | None  # the step it went on from, 0: from the start; None: it ended before
    fetched: bool  # from the bucket


def read_story(job: Job) -> list[Told]:
    """Every attempt has a `begin` and an `end`, in this order and under the next number."""
    lines = [json.loads(line) for line in (job.run_dir / "attempts.jsonl").read_text().splitlines()]
    begins = [line for line in lines if line["event"] == "begin"]
    ends = [line for line in lines if line["event"] == "end"]
    order = [
        (line["attempt"], line["event"]) for line in lines if line["event"] in ("begin", "end")
    ]
    assert order == [(n, event) for n in range(1, len(begins) + 1) for event in ("begin", "end")], (
        order
    )
    resumed: dict[int, int] = {}  # attempt -> the step of its newest `start`
    for line in lines:
        if line["event"] == "begin":
            attempt = line["attempt"]
        elif line["event"] == "start":
            resumed[attempt] = line["step"]
    story = []
    for begin, end in zip(begins, ends, strict=True):
        step = resumed.get(begin["attempt"])
        _, _, log = job.told().partition(f"] attempt {begin['attempt']} of ")
        found = RESUMED.search(log.partition("] attempt ")[0])
        if step is not None:
            assert step == (int(found[1]) if found else 0), (
                f"{end}, but its log says {found and found[0]}"
            )
        from_bucket = bool(found and found[2].startswith("s3://") and "fetched" in found[3])
        story.append(Told(begin, end, step, from_bucket))
    return story


def _sent_again(story: list[Told]) -> Told | None:
    """An attempt, not the first, that a TERM has ended: a busy slurmctld sends one again, to the
    requeued job's step, which has the same number, some 70 s later."""
    stopped = [each for each in story[1:] if each.end["reason"].startswith("stopped by SIGTERM")]
    return stopped[0] if stopped else None


def check_story(job: Job, *expected: tuple[str, str, list[str] | str]) -> list[Told]:
    """expected: of each attempt the verdict, the decision and the nodes to blame.

    Each attempt begins at the newest step that was committed when the last one ended, and goes on
    from there. After a node was lost with its disk that may be an older one, but none older than
    what was in the bucket by then.
    """
    whole = story = read_story(job)
    while len(story) > len(expected) and (again := _sent_again(story)) is not None:
        story = [each for each in story if each is not again]
    told = [(each.end["verdict"], each.end["decision"], each.end["blamed"]) for each in story]
    assert len(told) == len(expected), f"{told}\n{job.told()}"
    for each, wanted in zip(told, expected, strict=True):
        assert all(want in (ANY, found) for want, found in zip(wanted, each, strict=True)), (
            f"{told}\n{job.told()}"
        )
    at = 0
    for number, each in enumerate(whole):
        assert each.begin["step"] >= at, (
            whole
        )  # a save that was under way may have been committed since
        at = each.begin["step"]
        assert len(each.begin["nodes"]) == NODES[job.layout]
        assert (each.begin["job"], each.begin["restart"]) == (job.number, number), each.begin
        if each.resumed is None:
            assert each.end["verdict"] != "DONE" and each.end["step"] == at, each.end
        elif number == 0 or whole[number - 1].end["verdict"] == "PREEMPTED":
            assert each.resumed == at, each.end
        else:
            assert each.resumed >= job.seen_commit, each.end
        if each.resumed and job.own_disks:
            assert each.fetched, (
                f"{each.end}: not from the bucket, although the disks had been emptied"
            )
        at = each.end["step"]
    return story


def finished_like(job: Job, undisturbed: list[dict]) -> None:
    """It is done, every step's batch is that of the undisturbed run, and every step's loss to 1e-5."""
    job.wait(job.gone, "the job's end")
    assert job.verdict() == "DONE", job.told()
    lines = metrics(job.run_dir)
    steps = len(lines)
    assert [line["step"] for line in lines] == [line["step"] for line in undisturbed[:steps]]
    assert lines[-1]["step"] == job.steps
    wanted = [line["batch_digest"] for line in undisturbed[:steps]]
    assert [line["batch_digest"] for line in lines] == wanted
    differences = [
        abs(line["loss"] - other["loss"]) for line, other in zip(lines, undisturbed, strict=False)
    ]
    job.difference = max(differences)
    job.loss, job.loss_undisturbed = lines[-1]["loss"], undisturbed[steps - 1]["loss"]
    assert job.difference <= 1e-5, next((i + 1, d) for i, d in enumerate(differences) if d > 1e-5)
    if job.bucket is not None:
        assert job.bucket.newest_step("run") == job.steps
        assert job.bucket.incomplete("run") == []


def keep(job: Job, scenario: str, name: str) -> None:
    """Into $CLIP_TRAIN_KEEP_LOGS/<name>: the job's log, attempts.jsonl, each attempt's report, the
    losses, a row."""
    if KEEP not in os.environ:
        return
    folder = Path(os.environ[KEEP]) / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = ("attempts.jsonl", "metrics.jsonl", "VERDICT", "recipe.yaml")
    for file in (job.log, *(job.run_dir / each for each in names)):
        if file.exists():
            shutil.copy(file, folder)
    if (job.run_dir / "attempts").exists():
        shutil.copytree(job.run_dir / "attempts", folder / "attempts")
    try:
        story = read_story(job)
    except (OSError, AssertionError):  # the test has failed, and says why
        return
    row = {
        "scenario": scenario,
        "layout": job.layout,
        "checkpoints": "disk"
        if job.bucket is None
        else "S3, nodes' own disks"
        if job.own_disks
        else "S3",
        "attempts": [
            {key: each.end[key] for key in ("verdict", "step", "blamed", "decision")}
            | {"nodes": each.begin["nodes"], "resumed": each.resumed, "fetched": each.fetched}
            for each in story
        ],
        "verdict": job.verdict(),
        "loss": job.loss,
        "loss_undisturbed": job.loss_undisturbed,
        "difference": job.difference,
    }
    (folder / "row.json").write_text(json.dumps(row, indent=2) + "\n")
    (Path(os.environ[KEEP]) / "survive.md").write_text(table(read_rows(Path(os.environ[KEEP]))))


def read_rows(folder: Path) -> list[dict]:
    """In the order in which they came."""
    files = sorted(folder.glob("*/row.json"), key=lambda file: file.stat().st_mtime)
    return [json.loads(file.read_text()) for file in files]


def tell_attempts(attempts: list[dict]) -> str:
    """Attempts in a row that ended alike are told together: "PREEMPTED at 51, 97, 151; DONE at
    240"."""

    def alike(attempt: dict) -> tuple[str, str]:
        blamed, decision = " and ".join(attempt["blamed"]), attempt["decision"]
        told = [f"{blamed} to blame"] if blamed else []
        told += {
            "done": [],
            "requeue": [],
            "leave": ["left"],
            "give up": ["given up"],
            "stop": ["stopped"],
        }[decision]
        return attempt["verdict"], f" ({', '.join(told)})" if told else ""

    groups = [
        (ending, [str(each["step"]) for each in group])
        for ending, group in groupby(attempts, alike)
    ]
    return "; ".join(f"{verdict} at {', '.join(steps)}{told}" for (verdict, told), steps in groups)


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        "| What happens | Layout | Attempts: verdict at step | Verdict | Last loss | Largest "
        "difference of any step |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        done = row["difference"] is not None
        loss, difference = (f"{row['loss']:.6f}", f"{row['difference']:.1e}") if done else ("", "")
        if row["difference"] == 0:
            difference = "0"
        cells = (
            row["scenario"],
            row["layout"],
            tell_attempts(row["attempts"]),
            row["verdict"] or "",
            loss,
            difference,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
