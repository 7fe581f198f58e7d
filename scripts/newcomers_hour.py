"""What a newcomer does in the first hour, typed as the pages have it, on a fresh clone: from URLs to a shared model.

    python scripts/newcomers_hour.py [--anew] [--keep FOLDER]      in .venv of this folder; or `make hour`

A server on this machine has pictures and a table of their URLs (and some that are not there, or are no pictures).
img2dataset fetches them; then index, plan, train, a SIGKILL in the midst, the same line again, evaluate, export, and
the export in open_clip and in transformers, whose features are compared with those of the checkpoint; a report.
Every command is looked up in the page that has it: one that is no longer there is an error. The recipe is
docs/running.md's last. Prints a JSON line for each step, and one at the end.

Packages that the project needs are lent to the clone by the environment that runs this; with --anew all are installed,
by the Makefile. OpenCLIP and transformers come from .venv-peers; where it is missing, scripts/setup_peers.sh makes it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from clip_tools.demo import shapes  # noqa: E402
from clip_train.data.tar import iter_samples  # noqa: E402
from tests.documents import code_lines  # noqa: E402

PICTURES, MISSING, BROKEN = 3500, 60, 40  # four shards, of which the last is not full
KILLED_AFTER = 60  # steps
PATIENCE = 1800.0  # seconds, for any command
TOLERANCE = 1e-5  # of normalised features


@contextlib.contextmanager
def pictures(folder: Path) -> Iterator[list[tuple[str, str]]]:
    """(URL, caption) of drawings that a server on this machine has in memory, and of some that it has not."""
    content: dict[str, bytes] = {}
    captions: dict[str, str] = {}
    for shard in sorted(Path(shapes(folder, PICTURES).train).parent.glob("*.tar")):
        with shard.open("rb") as file:
            for sample in iter_samples(file):
                path = f"/{len(content):05d}.jpg"
                content[path], captions[path] = (
                    sample.members["jpg"],
                    sample.members["txt"].decode(),
                )
    content |= {f"/broken{i}.jpg": b"<html>gone</html>" for i in range(BROKEN)}
    captions |= {
        f"/{kind}{i}.jpg": "x"
        for kind, n in (("broken", BROKEN), ("missing", MISSING))
        for i in range(n)
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = content.get(self.path)
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 1024  # connections that wait: img2dataset has many threads

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # who has asked did not wait

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        table = [
            (f"http://127.0.0.1:{server.server_port}{path}", caption)
            for path, caption in captions.items()
        ]
        random.Random(0).shuffle(table)
        yield table
        server.shutdown()


class Newcomer:
    """Types commands in `home`, the clone, with its .venv activated."""

    def __init__(self, home: Path) -> None:
        self.home, self.number, self.start = home, 0, time.monotonic()
        launchers = (
            "PYTHONPATH",
            "VIRTUAL_ENV",
            "RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
        self.environ = {name: value for name, value in os.environ.items() if name not in launchers}
        self.environ["PATH"] = f"{home / '.venv' / 'bin'}{os.pathsep}{self.environ['PATH']}"

    def command(self, page: str, beginning: str) -> str:
        """The line of the page that begins so, without the comment behind it."""
        lines = [
            re.sub(r"\s+#.*", "", line).removeprefix("$ ")
            for line in code_lines(self.home / page, "bash", "")
        ]
        found = [line for line in lines if line.startswith(beginning)]
        if not found:
            raise SystemExit(f"{page} has no command that begins with: {beginning}")
        return min(found, key=len)

    def types(
        self, page: str, beginning: str, check: Callable[[str], Any] = lambda out: None
    ) -> str:
        """The output; `check` makes of it what the summary shows, and raises where it is not what the page says."""
        line = self.command(page, beginning)
        return self.does(page, line, lambda: self.run(line), check)

    def does(
        self, page: str, what: str, action: Callable[[], str], check: Callable[[str], Any]
    ) -> str:
        began = time.monotonic()
        out = action()
        try:
            found = check(out)
        except Exception as e:
            raise SystemExit(f"{out}\n{page}: {what}: {type(e).__name__}: {e}") from e
        self.number += 1
        step = {"step": self.number, "page": page, "command": " ".join(what.split())}
        step |= {"seconds": round(time.monotonic() - began, 1)} | (
            {} if found is None else {"found": found}
        )
        print(json.dumps(step), flush=True)
        return out

    def run(self, line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.home, env=self.environ, timeout=PATIENCE, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n$ {line}\nexit status {done.returncode}")
        return done.stdout

    def killed(self, line: str, run: Path) -> str:
        """SIGKILL, when there is a checkpoint to go on from and more has been trained since."""
        with (self.home / "killed.log").open("w") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.home,
                env=self.environ,
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + PATIENCE
        while last_step(run) < KILLED_AFTER or not list(
            (run / "checkpoints" / "commit").glob("*.json")
        ):
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                raise SystemExit(
                    f"{(self.home / 'killed.log').read_text()}\n$ {line}\ndid not get to be killed"
                )
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return f"killed after step {last_step(run)}"


def records(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Whole lines."""
    file = run / name
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(run: Path) -> int:
    return max((line["step"] for line in records(run)), default=0)


def expect(holds: object, found: Any) -> Any:
    if not holds:
        raise AssertionError(f"found {found}")
    return found


def clone(home: Path, anew: bool) -> str:
    """A fresh clone with an environment of its own; the commit."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(home)], check=True)
    if anew:
        subprocess.run(["make", ".venv/.ready"], cwd=home, check=True, stdout=subprocess.DEVNULL)
    else:
        venv = home / ".venv"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        (places,) = venv.glob("lib/python3.*/site-packages")
        (places / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        line = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "-e",
            ".",
        ]
        subprocess.run([str(venv / "bin" / "python"), *line], cwd=home, check=True)
    line = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(line, cwd=home, check=True, capture_output=True, text=True).stdout.strip()


def compare(newcomer: Newcomer, peers: Path, library: str, loading: str) -> Callable[[], str]:
    """Features by `library`, of the export that `loading` loads, with those of the checkpoint."""

    def features(python: Path, kind: str, place: str) -> np.ndarray:
        out = newcomer.home / f"{kind}.npy"
        if out.exists():  # ours, beside the first library
            return np.load(out)
        line = [str(python), "scripts/features_of.py", kind, place, "inputs", str(out)]
        environ = newcomer.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            line, cwd=newcomer.home, env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(
                f"{done.stdout}{done.stderr}\n{kind} cannot load what was exported: {place}"
            )
        return np.load(out)

    def action() -> str:
        ours = features(newcomer.home / ".venv" / "bin" / "python", "ours", "my.yaml")
        theirs = features(peers / "bin" / "python", library, loading)
        difference = float(np.abs(ours - theirs).max())
        apart = float(
            np.abs(ours[:, :1] - ours[:, 1:]).max()
        )  # of one sample's from another's: they are no constant
        return json.dumps(
            {
                "shape": list(theirs.shape),
                "largest_difference": difference,
                "between_samples": apart,
            }
        )

    return action


def inputs(home: Path, size: int = 32, num: int = 16) -> None:
    """Pictures of the held-out shard at the model's size, and their captions."""
    folder, texts = home / "inputs", []
    folder.mkdir()
    with (home / "shards" / "00003.tar").open("rb") as file:
        for i, sample in zip(range(num), iter_samples(file), strict=False):
            (folder / "x.jpg").write_bytes(sample.members["jpg"])
            Image.open(folder / "x.jpg").convert("RGB").resize((size, size)).save(
                folder / f"{i:02d}.png"
            )
            texts.append(sample.members["txt"].decode())
    (folder / "texts.json").write_text(json.dumps(texts))


def hour(newcomer: Newcomer, table: list[tuple[str, str]], peers: Path) -> None:
    home, run = newcomer.home, newcomer.home / "runs" / "my-run"
    first, data, readme, weights = (
        "docs/running.md",
        "docs/your_data.md",
        "README.md",
        "docs/weights.md",
    )
    (home / "captions.tsv").write_text(
        "url\tcaption\n" + "".join(f"{url}\t{text}\n" for url, text in table)
    )
    recipe = re.findall(
        r"^```yaml\n(.*?)^```", (home / first).read_text(), re.MULTILINE | re.DOTALL
    )[-1]
    (home / "my.yaml").write_text(recipe)
    steps, saves = (
        yaml.safe_load(recipe)["run"]["steps"],
        yaml.safe_load(recipe)["checkpoint"]["every_steps"],
    )

    newcomer.types(data, "python3 -m venv img2dataset-env")
    newcomer.types(data, "img2dataset-env/bin/pip install")
    newcomer.types(data, "img2dataset-env/bin/img2dataset", lambda out: fetched(home / "shards"))
    newcomer.types(
        data, "clip-train index 'shards/*.tar'", lambda out: indexed(out, home / "shards")
    )
    newcomer.types(data, "clip-train index 'shards/*.tar' --check")
    newcomer.types(readme, "clip-train doctor my.yaml")
    newcomer.types(first, "clip-train plan my.yaml", planned)
    newcomer.types(first, "clip-train train my.yaml --dry-run")

    train = newcomer.command(readme, "clip-train train my.yaml")
    newcomer.does(readme, f"{train}, and kill -9", lambda: newcomer.killed(train, run), str)
    newcomer.types(readme, "clip-train train my.yaml", lambda out: resumed(out, run, steps, saves))
    newcomer.types(
        readme, "clip-train watch runs/my-run", lambda out: expect("DONE" in out, "DONE")
    )
    newcomer.types(readme, "clip-train evaluate my.yaml", lambda out: evaluated(out, run, steps))

    inputs(home)
    for page, line, library in (
        (readme, "clip-train export my.yaml", "open_clip"),
        (weights, "clip-train export runs/my-run --format transformers", "transformers"),
    ):
        printed = newcomer.types(page, line)
        (loading,) = [each for each in printed.splitlines() if each.startswith(f"{library}.")]
        what = f"{loading} beside the checkpoint"
        newcomer.does(page, what, compare(newcomer, peers, library, loading), equal)
    newcomer.types(readme, "clip-train train my.yaml data.kind=synthetic")


def fetched(shards: Path) -> dict[str, int]:
    """Nearly all pictures (on a busy machine some time out), and none of the rest."""
    counts = [json.loads(file.read_text()) for file in sorted(shards.glob("*_stats.json"))]
    found = {
        name: sum(each[name] for each in counts)
        for name in ("count", "successes", "failed_to_resize")
    }
    expect(
        found["count"] == PICTURES + MISSING + BROKEN and found["failed_to_resize"] <= BROKEN, found
    )
    return expect(0.9 * PICTURES < found["successes"] <= PICTURES, {"shards": len(counts), **found})


def indexed(out: str, shards: Path) -> str:
    """As many samples as img2dataset says it has written."""
    line = next(each for each in out.splitlines() if " samples, " in each)
    return expect(f"{fetched(shards)['successes']:,} samples" in line, line)


def planned(out: str) -> str:
    return expect("128 = 8 ranks x 16" in out and "on H100" in out, "128 = 8 ranks x 16")


def resumed(out: str, run: Path, steps: int, saves: int) -> dict[str, Any]:
    """It went on from a checkpoint, to the end, without a gap; and it has learned."""
    step = int(re.findall(r"resuming from step (\d+)", out)[0])
    lines = {line["step"]: line["loss"] for line in records(run)}
    expect(
        sorted(lines) == list(range(1, steps + 1)) and step % saves == 0 and step >= saves,
        (step, sorted(lines)),
    )
    losses = [lines[each] for each in sorted(lines)]
    ends = float(np.mean(losses[:5])), float(np.mean(losses[-5:]))
    return expect(
        ends[1] < 0.8 * ends[0],
        {"from": step, "first_loss": round(ends[0], 3), "loss": round(ends[1], 3)},
    )


def evaluated(out: str, run: Path, steps: int) -> dict[str, float]:
    """What the run has measured of itself at its end, but for ties that another rounding breaks otherwise."""
    (told,) = [line for line in records(run, "eval.jsonl") if line["step"] == steps][-1:]
    found = {
        name: float(value)
        for name, value in re.findall(r"^([\w@]+): ([\d.e-]+)$", out, re.MULTILINE)
    }
    expect(
        found["num_samples"] == told["num_samples"]
        and abs(found["val_loss"] - told["val_loss"]) < 1e-4,
        out,
    )
    expect(
        all(abs(told[name] - value) <= 0.01 for name, value in found.items() if "@" in name), out
    )
    return {name: found[name] for name in ("num_samples", "val_loss", "dedup_image_to_text_R@5")}


def equal(out: str) -> dict[str, Any]:
    found = json.loads(out)
    return expect(
        found["largest_difference"] < TOLERANCE and found["between_samples"] > 100 * TOLERANCE,
        found,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--anew", action="store_true", help="install what the project needs, too")
    parser.add_argument(
        "--keep",
        metavar="FOLDER",
        type=Path,
        help="work here, and leave everything (default: gone)",
    )
    args = parser.parse_args()
    work = args.keep.resolve() if args.keep else Path(tempfile.mkdtemp(prefix="newcomer-"))
    work.mkdir(parents=True, exist_ok=True)
    peers = ROOT / ".venv-peers"
    if not (peers / "bin" / "python").exists():
        subprocess.run(
            ["bash", str(ROOT / "scripts" / "setup_peers.sh"), str(peers)],
            check=True,
            stdout=sys.stderr,
        )
    try:
        began = time.monotonic()
        commit = clone(work / "clip-train", args.anew)
        newcomer = Newcomer(work / "clip-train")
        with pictures(work / "drawn") as table:
            hour(newcomer, table, peers)
        seconds = round(time.monotonic() - began)
        print(
            json.dumps(
                {
                    "newcomers_hour": "passed",
                    "steps": newcomer.number,
                    "seconds": seconds,
                    "commit": commit,
                }
            )
        )
        return 0
    finally:
        if args.keep is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
