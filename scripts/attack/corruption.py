"""Each kind of file that a run keeps, damaged in each way: nothing wrong ever loads silently."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.attack import lab
from scripts.attack.case import REFUSED, SAME, VERDICT, Case, said
from tests.launcher.conftest import ENDLESS, finish, metrics, start, wait_for_commit
from tests.processes import kill_tree

KEEP = (*lab.SMALL, "checkpoint.keep_last=9")
LEASE = {7: "e000000-s0000000007.json", 14: "e000000.json"}
STEP = 14  # of the newest checkpoint; there is one of step 7 beside it


@functools.cache
def saved(ranks: int) -> Path:
    """A folder with a run that ended after the checkpoint of step 14, and what it would become."""
    folder = lab.folder() / f"saved{ranks}"
    status, out = lab.run(lab.recipe(folder), *KEEP, ranks=ranks)
    assert status == 0, out
    shutil.copytree(folder / "run", folder / "whole")
    for path in (folder / "run" / "checkpoints").rglob("*s0000000020*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def copied(folder: Path, ranks: int = 1) -> Path:
    shutil.copytree(saved(ranks) / "run", folder / "run")
    return folder / "run"


def resumed(folder: Path, ranks: int, *overrides: str) -> str:
    """The run continues, wherever from, to the curve of the run that nobody attacked; or it refuses."""
    file = lab.recipe(folder)
    status, out = lab.run(file, *KEEP, *overrides, ranks=ranks)
    if status == 0:
        assert "Traceback" not in out, out
        expected = lab.curve(saved(ranks) / "whole")
        assert lab.curve(folder / "run")[-6:] == expected[-6:], out
        return SAME
    return said(status, out, str(folder / "run"))


# -- the files of a checkpoint


def newest(run_dir: Path, name: str, step: int = STEP) -> Path:
    """A file of the checkpoint of `step`, by the kind of it."""
    root = run_dir / "checkpoints"
    if name == "commit":
        return root / "commit" / f"e000000-s{step:010d}.json"
    if name == "lease":  # an older one is a copy of the marker
        return root / ("commit" if step == 7 else "lease") / LEASE[step]
    (attempt,) = (root / "ckpt" / f"s{step:010d}").iterdir()
    return attempt / name


def flipped(run_dir: Path, file: Path, older: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def last_flipped(run_dir: Path, file: Path, older: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 0x40]) + content[-8:])


def cut(run_dir: Path, file: Path, older: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(run_dir: Path, file: Path, older: Path) -> None:
    os.truncate(file, 0)


def longer(run_dir: Path, file: Path, older: Path) -> None:
    with file.open("ab") as out:
        out.write(b"x" * 100)


def gone(run_dir: Path, file: Path, older: Path) -> None:
    file.unlink()


def an_older_one(run_dir: Path, file: Path, older: Path) -> None:
    shutil.copyfile(older, file)


def a_folder(run_dir: Path, file: Path, older: Path) -> None:
    file.unlink()
    file.mkdir()


def zeros(run_dir: Path, file: Path, older: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def a_pipe(run_dir: Path, file: Path, older: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "a byte flipped": flipped,
    "a byte flipped near its end": last_flipped,
    "cut": cut,
    "emptied": emptied,
    "longer": longer,
    "gone": gone,
    "an older one put back": an_older_one,
    "a folder in its place": a_folder,
    "zeros": zeros,
    "a pipe in its place": a_pipe,
}
FILES = (
    "commit",
    "lease",
    "_MANIFEST.json",
    "_LAYOUT.bin",
    "rank00000.safetensors",
    "_rank00000.json",
)
RUN_FILES = (
    "metrics.jsonl",
    "examples.jsonl",
    "attempts.jsonl",
    "recipe.yaml",
    "resolved.yaml",
    "VERDICT",
)


def of_a_checkpoint(name: str, damage: Callable[..., None]) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        run_dir = copied(folder)
        damage(run_dir, newest(run_dir, name), newest(run_dir, name, 7))
        return resumed(folder, 1)

    return attack


def of_a_run(name: str, damage: Callable[..., None]) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        run_dir = copied(folder)
        (run_dir / name).touch()
        (run_dir / name).write_bytes((run_dir / name).read_bytes() or b"FAILED\n{}\n" * 9)
        damage(run_dir, run_dir / name, run_dir / "report.html")
        return resumed(folder, 1)

    return attack


def digest(folder: Path) -> str:
    file = folder / "open_clip_model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def exported() -> set[str]:
    """What an export of a whole checkpoint gives, of the newest one only."""
    out = lab.folder() / "exported"
    status, text = lab.run(saved(1) / "run", f"--output={out}", verb="export")
    assert status == 0, text
    return {digest(out)}


def in_an_export(name: str, damage: Callable[..., None]) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        run_dir = copied(folder)
        damage(run_dir, newest(run_dir, name), newest(run_dir, name, 7))
        out = folder / "out"
        status, text = lab.run(run_dir / "checkpoints", f"--output={out}", verb="export")
        if status == 0 and digest(out) in exported():
            return SAME
        if status == 0:  # the step is said; without a marker there is no newer checkpoint
            assert "step 7 of" in text and (name == "commit" or "14" in text), text
            return REFUSED
        assert not out.exists() or not any(out.iterdir())
        return said(status, text, str(run_dir))

    return attack


# -- several ranks, places and processes


def swapped(name: str, other: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        run_dir = copied(folder, 2)
        first, second = newest(run_dir, name), newest(run_dir, other)
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        return resumed(folder, 2)

    return attack


def checkpoints_swapped(folder: Path) -> str:
    """The folders of steps 7 and 14 have each other's names."""
    run_dir = copied(folder)
    steps = run_dir / "checkpoints" / "ckpt"
    (steps / "s0000000007").rename(steps / "x")
    (steps / f"s{STEP:010d}").rename(steps / "s0000000007")
    (steps / "x").rename(steps / f"s{STEP:010d}")
    return resumed(folder, 1)


def renamed(folder: Path) -> str:
    """The marker of step 7 called step 20's: the run would be at its end."""
    run_dir = copied(folder)
    shutil.copyfile(newest(run_dir, "commit", 7), newest(run_dir, "commit", 20))
    return resumed(folder, 1)


def of_another_run(folder: Path) -> str:
    """The newest checkpoint is another run's, whole, under this one's names."""
    status, out = lab.run(lab.recipe(folder), *KEEP, "run.seed=4")
    assert status == 0, out
    other = folder / "other"
    (folder / "run").rename(other)
    run_dir = copied(folder)
    for name in ("_MANIFEST.json", "_LAYOUT.bin", "rank00000.safetensors"):
        shutil.copyfile(newest(other, name), newest(run_dir, name))
    return resumed(folder, 1)


def both_places(folder: Path) -> str:
    """A copied run directory is resumed here and there."""
    copied(folder)
    shutil.copytree(folder / "run", folder / "there" / "run")
    return resumed(folder, 1) and resumed(folder / "there", 1)


def both_places_one_store(folder: Path) -> str:
    """The same with one store, at the same time: one of them may write, the other ends in words."""
    copied(folder)
    store = f"checkpoint.remote={folder / 'store'}"
    shutil.copytree(folder / "run", folder / "there" / "run")
    begun = [
        start(lab.recipe(place), *lab.SMALL, store, *ENDLESS)
        for place in (folder, folder / "there")
    ]
    ended = next(process for process in iter_until(begun))
    status, out = finish(ended)
    for process in begun:
        process.terminate()
        finish(process)
    return said(status, out, "writes to", "checkpoint.remote")


def iter_until(processes: list) -> Iterator:
    """The process that ends first."""
    while not any(process.poll() is not None for process in processes):
        time.sleep(0.1)
    yield next(process for process in processes if process.poll() is not None)


def two_recipes(folder: Path) -> str:
    """Another recipe into the same folder."""
    copied(folder)
    status, out = lab.run(lab.recipe(folder), *KEEP, "optim.lr=1e-2", "run.seed=9")
    return said(status, out, "run.seed", "checkpoint.allow_changed_recipe")


def two_models(folder: Path) -> str:
    """Another model into the same folder."""
    copied(folder)
    file = lab.recipe(folder)
    model = folder / "small.json"
    model.write_text(model.read_text().replace('"layers": 2', '"layers": 1'))
    status, out = lab.run(file, *KEEP)
    return said(status, out, "model")


def while_retention_removes(verb: str, *more: str) -> Callable[[Path], str]:
    """The verb, over and over, at a run that keeps one checkpoint and saves at each step."""

    def attack(folder: Path) -> str:
        file = lab.recipe(folder)
        save = ("checkpoint.every_steps=1", "checkpoint.keep_last=1")
        run = start(file, *lab.SMALL, *save, *ENDLESS)
        wait_for_commit(folder / "run", run)
        for number in range(6):
            place = folder / "run" if verb != "export" else folder / "run" / "checkpoints"
            here = [word.format(out=folder / f"out{number}") for word in more]
            status, out = finish(start(place, *here, verb=verb))
            if status:
                said(status, out)
            assert "Traceback" not in out, out
        run.terminate()
        finish(run)
        return VERDICT

    return attack


def under_a_live_run(name: str, damage: Callable[..., None]) -> Callable[[Path], str]:
    """A checkpoint is damaged while the run that wrote it is at work; killed, it continues."""

    def attack(folder: Path) -> str:
        run = start(lab.recipe(folder), *KEEP, "log.progress=false", fault="hold:0:16")
        while not newest_is_there(folder / "run"):
            time.sleep(0.05)
            assert run.poll() is None, finish(run)[1]
        damage(folder / "run", newest(folder / "run", name), newest(folder / "run", name, 7))
        kill_tree(run)
        return resumed(folder, 1)

    return attack


def newest_is_there(run_dir: Path) -> bool:
    return newest(run_dir, "commit").exists() and len(metrics(run_dir)) >= 15


SEVERAL = {
    "two ranks' files swapped": swapped("rank00000.safetensors", "rank00001.safetensors"),
    "two ranks' manifests swapped": swapped("_rank00000.json", "_rank00001.json"),
    "manifest and layout swapped": swapped("_MANIFEST.json", "_LAYOUT.bin"),
    "two checkpoints' folders swapped": checkpoints_swapped,
    "an older marker under a newer name": renamed,
    "the files of another run": of_another_run,
    "a copied run directory resumed in both places": both_places,
    "the same into one store at once": both_places_one_store,
    "two recipes into one folder": two_recipes,
    "two models into one folder": two_models,
    "an export while retention removes": while_retention_removes("export", "--output={out}"),
    "--verify while retention removes": while_retention_removes("checkpoints", "--verify"),
    "an evaluation while retention removes": while_retention_removes("evaluate"),
}
CHEAP = {"rank00000.safetensors: a byte flipped", "commit: a pipe in its place"}
NAMED: dict[str, Callable[[Path], str]] = {
    **{f"{f}: {way}": of_a_checkpoint(f, do) for f in FILES for way, do in DAMAGES.items()},
    **{f"export of {f}: {way}": in_an_export(f, do) for f in FILES for way, do in DAMAGES.items()},
    **{f"{f} of the run: {way}": of_a_run(f, do) for f in RUN_FILES for way, do in DAMAGES.items()},
    **{
        f"under a live run, {f}: {way}": under_a_live_run(f, DAMAGES[way])
        for f in ("commit", "rank00000.safetensors", "_MANIFEST.json")
        for way in ("a byte flipped", "gone")
    },
    **SEVERAL,
}
CASES = [
    Case(
        name,
        attack,
        cheap=name in CHEAP,
        waits="several starts" if name in SEVERAL else "",
        prepare=functools.partial(saved, 2 if "ranks'" in name or "manifest and" in name else 1),
    )
    for name, attack in NAMED.items()
]
