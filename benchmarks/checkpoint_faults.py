"""Everything that can go wrong with a remote checkpoint, once: what happened, what the user saw, what was lost.

Each row is a life of its own on an empty bucket of a real S3 server (LocalStack, from scripts/setup_s3.sh) behind a
proxy that injects the fault: it saves steps 1, 2 and 3, and is then resumed on its own disk and on an empty one. The
waits are short (a try at one operation lasts a second), so nothing here says how long anything takes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import finish, parser

from clip_train.checkpoint import CheckpointConfig, CheckpointManager
from clip_train.errors import ClipTrainError
from tests.checkpoint.parts import cut, whole
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.server import Server, chosen

TARGETS = {
    "own disk": "resuming on the same disk loses no step that was saved",
    "empty disk": "resuming elsewhere gives the newest step that the store holds whole",
    "told": "what did not work is told; what passed by itself is not",
    "whole": "no commit in the bucket is ever incomplete through this program's doing",
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
        self.manager = self.new(folder / "own")

    def new(self, folder: Path) -> CheckpointManager:
        config = CheckpointConfig(
            remote=f"{self.bucket.url}/run", grace_seconds=4, max_failed_saves=2, orphan_grace_minutes=0
        )
        return CheckpointManager(config, folder, log=self.said.append)

    def save(self, step: int, wait: bool = True) -> None:
        state = {"step": step}
        self.manager.save(step, cut(whole(step), 0, 1), {}, state, wait=wait)

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
        skipped = "".join(f" (passed over {each})" for each in found.skipped) if found else ""
        return f"{found.step}{skipped}" if found else "nothing"


def nothing(life: Life) -> None:
    """No fault."""


def fault(*faults: Fault) -> Callable[[Life], None]:
    def inject(life: Life) -> None:
        life.proxy.faults = list(faults)

    return inject


def spoil_newest(how: str) -> Callable[[Life], None]:
    """The newest checkpoint's data, where it is stored."""

    def spoil(life: Life) -> None:
        (key,) = [key for key in life.bucket.keys("run/ckpt/s0000000003") if key.endswith(".safetensors")]
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


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 300 kB under `folder`, where this user may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    line = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)]
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
    "503 bursts": (fault(Fault("status", every=4, burst=3, method=ALL, key="")), nothing, "any"),
    "reset: data": (fault(Fault("reset", times=2, method=WRITES, key="safetensors")), nothing, "fine"),
    "reset: rank's word": (fault(Fault("reset", times=2, method="PUT", key="_rank")), nothing, "fine"),
    "reset: manifest": (fault(Fault("reset", times=2, method="PUT", key="_MANIFEST")), nothing, "fine"),
    "reset: commit": (fault(Fault("reset", times=2, method="PUT", key="run/commit")), nothing, "fine"),
    "reset: lease": (fault(Fault("reset", times=2, method="PUT", key="run/lease")), nothing, "fine"),
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
    "clock an hour off": (fault(Fault("skew", method="GET", key="")), nothing, "told"),
    "clock refused": (
        fault(Fault("status", method=ALL, key="", code=403, s3code="RequestTimeTooSkewed")), nothing, "refused",
    ),
}  # fmt: skip
AFTERWARDS: dict[str, tuple[Callable, str]] = {
    "stored bit flip": (spoil_newest("flipped"), "told"),
    "deleted object": (spoil_newest("deleted"), "told"),
    "hidden listing": (fault(Fault("hide", key="", hidden="s0000000003")), "fine"),
    "slow drip": (fault(Fault("drip", times=2, key="safetensors")), "fine"),
    "bit flip: coming down": (fault(Fault("flip", times=2, key="safetensors|MANIFEST|commit")), "fine"),
    "cut: coming down": (fault(Fault("cut", times=2, key="safetensors|MANIFEST|commit")), "fine"),
}


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    if missing := chosen().missing():
        print(missing)
        return 1
    os.environ["CLIP_TRAIN_S3_PATIENCE_SECONDS"] = "1"
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    server = chosen()().start()
    try:
        with tempfile.TemporaryDirectory() as temporary, FaultyProxy(server.port, server.sign) as proxy:
            os.environ |= server.environment(proxy.url)

            def run(name: str, before: Callable, between: Callable, expected: str, after: Callable = nothing) -> None:
                life = Life(Path(temporary, name.replace(" ", "-").replace(":", "")), server, proxy, f"row{len(rows)}")
                life.live(before, between)
                after(life)
                row = judge(life, name, expected, spoiled=name in ("stored bit flip", "deleted object"), missed=missed)
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
                    run("disk full", nothing, nothing, "refused")
                else:
                    print("disk full: not run, this user may not mount a small disk")
    finally:
        server.stop()
    return finish("checkpoint_faults", rows, TARGETS, missed, args)


def judge(life: Life, name: str, expected: str, *, spoiled: bool, missed: list[str]) -> dict[str, Any]:
    told = [line for line in life.said if not line.startswith(("waiting up to", "finishing"))]
    saved = sorted(int(path.name.split("-s")[1][:10]) for path in (life.folder / "own/commit").glob("*.json"))
    in_store = [marker["step"] for marker in life.bucket.commits("run").values()]
    whole_in_store = [step for step in in_store if not (spoiled and step == 3)]
    elsewhere = life.resumed("empty")
    own = life.resumed("own")
    life.proxy.faults = []
    told += [elsewhere.partition(" ")[2]] if "passed over" in elsewhere else []
    if saved and not own.startswith(str(saved[-1])):
        missed.append(f"{name}: own disk resumed from {own}, saved {saved}")
    if not elsewhere.startswith(str(whole_in_store[-1]) if whole_in_store else "nothing"):
        missed.append(f"{name}: empty disk resumed from {elsewhere}, in the store {in_store}")
    outcome = "refused" if life.refused else "told" if told else "fine"
    if expected not in (outcome, "any"):
        missed.append(f"{name}: {outcome} instead of {expected}: {life.refused or told}")
    if not spoiled and (wrong := life.bucket.incomplete("run")):
        missed.append(f"{name}: {wrong}")
    saw = life.refused or (told[0] if told else "nothing: it passed by itself")
    return {
        "fault": name, "on the disk": str(saved), "in the store": str(in_store), "the user saw": saw,
        "resumes on its disk from": own, "on an empty disk from": elsewhere,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
