"""Everything that can go wrong with a remote checkpoint, once: what happened, what the user saw, what was lost.

Each row is a life of its own on an empty bucket of a real S3 server (LocalStack, from scripts/setup_s3.sh) behind a
proxy that injects the fault: it saves steps 1, 2 and 3, and is then resumed on its own disk and on an empty one, where
every tensor is compared with what was saved. The waits are short (a try at one operation lasts a second), so nothing
here says how long anything takes. `--json benchmarks/results/checkpoint_faults.json` records it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import finish, parser

from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager
from clip_train.checkpoint.restore import describe_skipped
from clip_train.errors import ClipTrainError
from tests.checkpoint.eyes import damaged_in, newest_in
from tests.checkpoint.parts import bits, cut, whole
from tests.checkpoint.runs import kill_writer
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.server import Server, chosen

TARGETS = {
    "own disk": "every step is saved there unless the run was refused, and resuming on it loses none",
    "empty disk": "resuming elsewhere gives the newest step that the store holds whole",
    "content": "what is resumed is equal to the last bit to what was saved",
    "told": "what did not work is told; what passed by itself is not",
    "whole": "no commit in the bucket or on the disk is ever incomplete through this program's doing",
}
WRITES = "PUT|POST"
ALL = "PUT|POST|GET|HEAD|DELETE"


class Life:
    """One run on one bucket."""

    def __init__(self, folder: Path, server: Server, proxy: FaultyProxy, name: str) -> None:
        self.folder, self.proxy = folder, proxy
        self.bucket = Bucket(server, name)
        self.said: list[str] = []
        self.refused: str | None = None
        self.padding = 0  # floats, so that the upload has parts
        self.manager = self.new(folder / "own")

    def new(self, folder: Path, grace_seconds: float = 4) -> CheckpointManager:
        config = CheckpointConfig(
            remote=f"{self.bucket.url}/run",
            grace_seconds=grace_seconds,
            max_failed_saves=3,
        )
        return CheckpointManager(config, folder, log=self.said.append, orphan_seconds=0.0)

    def save(self, step: int, wait: bool = True) -> None:
        own = {"padding": torch.full((self.padding,), float(step))} if self.padding else {}
        self.manager.save(step, cut(whole(step), 0, 1), own, {"step": step}, wait=wait)

    def live(self, before: Callable[[Life], None], between: Callable[[Life], None]) -> None:
        """Steps 1 to 3, with something done before the first and before the second."""
        try:
            before(self)
            self.manager.preflight()
            self.manager.resume()
            self.save(1)
            between(self)
            self.save(2)
            self.save(3)
            self.manager.poll()
        except ClipTrainError as e:
            self.refused = f"{type(e).__name__}: {e}"
        self.proxy.faults = []
        with contextlib.suppress(ClipTrainError):
            self.manager.close()

    def resumed(self, place: str) -> str:
        manager = self.new(self.folder / place)
        try:
            found = manager.resume()
        except ClipTrainError as e:
            return f"{type(e).__name__}: {e}"
        for (name, slot), want in whole(found.step).items() if found else ():
            if bits(found.reader.read(name, slot, 0, want.numel())) != bits(want):
                return f"{found.step}, but {slot} of {name} differs"
        skipped = describe_skipped(found.skipped) if found else []
        passed = "".join(f" (passed over {each})" for each in skipped)
        return f"{found.step}{passed}" if found else "nothing"


def nothing(life: Life) -> None:
    """No fault."""


def fault(*faults: Fault) -> Callable[[Life], None]:
    def inject(life: Life) -> None:
        life.proxy.faults = list(faults)

    return inject


def spoil_newest(how: str) -> Callable[[Life], None]:
    """The newest checkpoint's data, where it is stored."""

    def spoil(life: Life) -> None:
        (key,) = [
            key for key in life.bucket.keys("run/ckpt/s0000000003") if key.endswith(".safetensors")
        ]
        content = life.bucket.get(key)
        if how == "deleted":
            life.bucket.delete(key)
        else:
            life.bucket.put(key, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])

    return spoil


def successor(life: Life) -> None:
    """Another process of the same run, on another machine."""
    other = life.new(life.folder / "other")
    other.resume()
    other.begin()
    other.close()


def successor_unseen(life: Life) -> None:
    """Another one on the same disk; and this one loses its connection to the store."""
    other = life.new(life.folder / "own")
    other.resume()
    other.begin()
    other.close()
    life.proxy.faults = [Fault("reset", method=ALL, key="")]


def kill_the_writer(life: Life) -> None:
    """While it has step 2 in hand."""
    life.proxy.faults = [Fault("hang", method=WRITES, key="ckpt")]
    life.save(2, wait=False)
    kill_writer()
    life.proxy.faults = []


def bursts(life: Life) -> None:
    """One request in four is the first of three that fail; with the patience that passes them."""
    os.environ["CLIP_TRAIN_S3_PATIENCE_SECONDS"] = "30"
    life.manager = life.new(life.folder / "own", grace_seconds=60)
    life.proxy.faults = [Fault("status", every=4, burst=3, method=ALL, key="")]


def in_parts(*faults: Fault) -> Callable[[Life], None]:
    """Of files that are uploaded in several parts."""

    def inject(life: Life) -> None:
        life.padding = 3_000_000
        life.proxy.faults = list(faults)

    return inject


def fill_disk(life: Life) -> None:
    """All but what a checkpoint needs beside the space that is left to others."""
    (life.folder / "own" / "somebody's").write_bytes(bytes(40 << 20))
    life.manager.config = life.manager.config.model_copy(update={"max_failed_saves": 2})


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 90 MiB under `folder`, where this user may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    line = ["mount", "-t", "tmpfs", "-o", "size=90m", "none", str(folder)]
    mounted = subprocess.run(line, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


DENIED = {"code": 403, "s3code": "AccessDenied"}
CASES: dict[str, tuple[Callable, Callable, str]] = {
    # name: (before step 1, before step 2, what is expected: "fine" | "told" | "refused")
    "no fault": (nothing, nothing, "fine"),
    "503 bursts": (bursts, nothing, "fine"),
    "reset: data": (fault(Fault("reset", times=2, method=WRITES, key="safetensors")), nothing, "fine"),
    "reset: rank's manifest": (fault(Fault("reset", times=2, method="PUT", key="_rank")), nothing, "fine"),
    "reset: manifest": (fault(Fault("reset", times=2, method="PUT", key="_MANIFEST")), nothing, "fine"),
    "reset: commit": (fault(Fault("reset", times=2, method="PUT", key="run/commit")), nothing, "fine"),
    "reset: lease": (fault(Fault("reset", times=2, method="PUT", key="run/lease")), nothing, "fine"),
    "reset: removal": (fault(Fault("reset", times=4, method="DELETE", key="run/(ckpt|commit)")), nothing, "fine"),
    "reset: a part": (in_parts(Fault("reset", times=2, method="PUT", key="safetensors")), nothing, "fine"),
    "reset: completion": (in_parts(Fault("reset", skip=1, times=2, method="POST", key="safetensors")), nothing, "fine"),
    "lost answer: completion": (
        in_parts(Fault("lost", skip=1, times=1, method="POST", key="safetensors")), nothing, "fine",
    ),
    "lost answer: data": (fault(Fault("lost", times=2, method=WRITES, key="safetensors")), nothing, "fine"),
    "lost answer: commit": (fault(Fault("lost", times=2, method="PUT", key="run/commit")), nothing, "fine"),
    "bit flip: going up": (fault(Fault("upflip", times=2, method="PUT", key="safetensors")), nothing, "fine"),
    "hang: data": (nothing, fault(Fault("hang", times=1, method="PUT", key="safetensors")), "any"),
    "store down for a while": (nothing, fault(Fault("status", times=40, method=WRITES, key="ckpt")), "told"),
    "store down for good": (nothing, fault(Fault("status", method=WRITES, key="ckpt")), "told"),
    "bucket gone": (nothing, fault(Fault("status", method=ALL, key="", code=404, s3code="NoSuchBucket")), "told"),
    "access denied at start": (fault(Fault("status", method="PUT", key="", **DENIED)), nothing, "refused"),
    "access denied in mid-run": (nothing, fault(Fault("status", method=WRITES, key="ckpt", **DENIED)), "told"),
    "expired token": (nothing, fault(Fault("expired", method=ALL, key="")), "told"),
    "two writers": (nothing, successor, "refused"),
    "two writers, the first cut off from the store": (nothing, successor_unseen, "refused"),
    "writer killed": (nothing, kill_the_writer, "told"),
    "conditional writes ignored": (fault(Fault("unconditional", method="PUT", key="")), nothing, "told"),
    "clock refused": (
        fault(Fault("status", method=ALL, key="", code=403, s3code="RequestTimeTooSkewed")), nothing, "refused",
    ),
}  # fmt: skip
AFTERWARDS: dict[str, tuple[Callable, str]] = {
    "stored bit flip": (spoil_newest("flipped"), "told"),
    "deleted object": (spoil_newest("deleted"), "told"),
    "slow drip": (fault(Fault("drip", times=2, key="safetensors")), "fine"),
    "reset: coming down": (
        fault(Fault("reset", times=2, key="safetensors|MANIFEST|commit")),
        "fine",
    ),
    "bit flip: coming down": (
        fault(Fault("flip", times=2, key="safetensors|MANIFEST|commit")),
        "fine",
    ),
    "cut: coming down": (fault(Fault("cut", times=2, key="safetensors|MANIFEST|commit")), "fine"),
}


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    if missing := chosen().missing():
        print(missing)
        return 1
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    server = chosen()().start()
    try:
        with (
            tempfile.TemporaryDirectory() as temporary,
            FaultyProxy(server.port, server.sign) as proxy,
        ):
            os.environ |= server.environment(proxy.url)

            def run(
                name: str,
                before: Callable,
                between: Callable,
                expected: str,
                after: Callable = nothing,
            ) -> None:
                os.environ["CLIP_TRAIN_S3_PATIENCE_SECONDS"] = "1"
                life = Life(
                    Path(temporary, name.replace(" ", "-").replace(":", "")),
                    server,
                    proxy,
                    f"row{len(rows)}",
                )
                life.live(before, between)
                after(life)
                row = judge(
                    life,
                    name,
                    expected,
                    spoiled=name in ("stored bit flip", "deleted object"),
                    missed=missed,
                )
                rows.append(row)
                print(" | ".join(str(value) for value in row.values()), flush=True)

            for name, (before, between, expected) in CASES.items():
                if not args.quick or name in ("no fault", "lost answer: commit", "two writers"):
                    run(name, before, between, expected)
            for name, (after, expected) in AFTERWARDS.items():
                if not args.quick or name == "stored bit flip":
                    run(name, nothing, nothing, expected, after)
            with small_disk(Path(temporary, "disk-full", "own")) as mounted:
                if mounted:
                    run("disk full", nothing, fill_disk, "refused")
                else:
                    print("disk full: not run, this user may not mount a small disk")
    finally:
        server.stop()
    return finish("checkpoint_faults", rows, TARGETS, missed, args, brief(rows))


def judge(
    life: Life, name: str, expected: str, *, spoiled: bool, missed: list[str]
) -> dict[str, Any]:
    told = [line for line in life.said if not line.startswith(("waiting up to", "finishing"))]
    saved = sorted(step for _, step in newest_in(life.folder / "own"))
    in_store = [marker["step"] for marker in life.bucket.commits("run").values()]
    whole_in_store = [step for step in in_store if not (spoiled and step == 3)]
    wrong = damaged_in(life.folder / "own") + ([] if spoiled else life.bucket.incomplete("run"))
    elsewhere = life.resumed("empty")
    own = life.resumed("own")
    life.proxy.faults = []
    told += [elsewhere.partition(" ")[2]] if "passed over" in elsewhere else []
    # of a run that is refused, the disk may have the step that the store did not take any more
    if saved != [1, 2, 3][: len(saved) if life.refused else None]:
        missed.append(f"{name}: only {saved} saved on the disk")
    if not own.startswith(str(saved[-1]) if saved else "nothing") or "differs" in own:
        missed.append(f"{name}: own disk resumed from {own}, saved {saved}")
    if (
        not elsewhere.startswith(str(whole_in_store[-1]) if whole_in_store else "nothing")
        or "differs" in elsewhere
    ):
        missed.append(f"{name}: empty disk resumed from {elsewhere}, in the store {in_store}")
    outcome = "refused" if life.refused else "told" if told else "fine"
    if expected not in (outcome, "any"):
        missed.append(f"{name}: {outcome} instead of {expected}: {life.refused or told}")
    missed += [f"{name}: {each}" for each in wrong]
    saw = life.refused or next(
        (each for each in told if each.startswith("checkpoint of")), (told or [PASSED])[0]
    )
    return {
        "fault": name, "on the disk": str(saved), "in the store": str(in_store), "the user saw": shortened(saw),
        "resumes on its disk from": shortened(own), "on an empty disk from": shortened(elsewhere),
    }  # fmt: skip


PASSED = "nothing: it passed by itself"


def shortened(text: str) -> str:
    """A message without what differs from run to run."""
    for pattern, instead in (
        (r"\brow\d+\b", "bucket"), (r"\S*/own\b", "DIR"), (r"(e\d{6})-[0-9a-f]{8}", r"\1-*"),
        (r"\[Errno \d+\] ", ""), (r"preflight/\w+", "preflight/*"),
        (r"process \d+ on \S+ since \S+", "process P on HOST"),
        (r"^\((passed over .*)\)$", r"\1"),
    ):  # fmt: skip
        text = re.sub(pattern, instead, text)
    return text


def brief(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is recorded: faults with the same end in one row."""
    merged: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["fault"] != "no fault":
            merged.setdefault((what_happened(row), what_was_seen(row)), []).append(row["fault"])
    return [
        {"fault": by_kind(faults), "what happened": happened, "what the user saw": saw}
        for (happened, saw), faults in merged.items()
    ]


def what_happened(row: dict[str, Any]) -> str:
    disk, store = len(json.loads(row["on the disk"])), len(json.loads(row["in the store"]))
    own, elsewhere = (
        row[key].partition(" ")[0] for key in ("resumes on its disk from", "on an empty disk from")
    )
    if own == "nothing":
        return "refused before the model is built"
    saves = (
        "all saves in both places"
        if disk == store == 3
        else f"{disk} of 3 saves on the disk, {store} in the store"
    )
    if own == elsewhere:
        return saves if own == "3" else f"{saves}; continues from {own}"
    return f"{saves}; continues from {own}, elsewhere from {elsewhere}"


def what_was_seen(row: dict[str, Any]) -> str:
    if row["the user saw"] == PASSED:
        return PASSED
    text = re.sub(r"ckpt/s0*(\d)/e\d{6}-\*", r"ckpt/.../\1", row["the user saw"])
    text = re.sub(r"(s3://bucket/run): (ckpt|writing|listing)", r"\2", text)
    return f"`{text if len(text) < 190 else text[:180].rsplit(' ', 1)[0] + ' ...'}`"


def by_kind(faults: list[str]) -> str:
    kinds: dict[str, list[str]] = {}
    for kind, _, what in (fault.partition(": ") for fault in faults):
        kinds.setdefault(kind, []).extend([what] if what else [])
    return "; ".join(f"{kind}: {', '.join(what)}" if what else kind for kind, what in kinds.items())


if __name__ == "__main__":
    sys.exit(main())
