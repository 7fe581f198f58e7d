"""The functions of ours that one sample, one checkpoint, one recipe value and one error meet.

    python scripts/journeys.py             a table: functions, modules, and the limit
    python scripts/journeys.py --list      every function too

Runs `clip-train train` on 64 drawn samples, with a tracer in every process (ranks, loader workers,
the checkpoint writer). A function meets a thing if one of its variables holds it when the function
returns. Distinct functions are counted:

sample       a sample's members, its piece of a batch, the batch, the micro-batch, its features and
             their gradients; without the layers of the model and the arithmetic of the loss
checkpoint   fragments, the snapshot of a rank, its manifest and the commit, from the engine to a
             remote store; and from there back into the engine of another run; without the launcher,
             which only compares the step and the recipe of a resumed checkpoint with its own
value        `optim.weight_decay`, or the recipe's section that contains it
error        an exception raised in a step, or its report, until the process ends

A comprehension counts as part of its function.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"sample": 35, "checkpoint": 35, "value": 15, "error": 10}
DECAY = 0.0123457  # no other number of the recipe

TRACER = """
import os, sys, threading
ROOT, OUT, DECAY = {root!r}, {out!r}, {decay!r}
PACKAGES = tuple(os.path.join(ROOT, p) + os.sep for p in ("clip_train", "launcher", "clip_tools"))
HIDDEN = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>")
CARRIERS = {{
    "Piece": "sample", "Batch": "sample", "MicroBatch": "sample", "CachedMicroBatch": "sample",
    "LossOutput": "sample", "OptimConfig": "value", "Fragment": "checkpoint",
    "SaveRequest": "checkpoint", "Plan": "checkpoint", "Manifest": "checkpoint",
    "FileEntry": "checkpoint", "Commit": "checkpoint", "CommitRef": "checkpoint",
    "Found": "checkpoint", "Resumed": "checkpoint", "Layout": "checkpoint",
    "FragmentReader": "checkpoint", "CheckpointFiles": "checkpoint",
}}
NOT_COUNTED = {{
    "sample": ("clip_train/models/", "clip_train/contrastive/"),
    "checkpoint": ("launcher/",),
}}
seen = set()

def note(journey, code):
    place = os.path.relpath(code.co_filename, ROOT)
    if place.startswith(NOT_COUNTED.get(journey, ())):
        return
    entry = f"{{journey}}\\t{{place}}\\t{{getattr(code, 'co_qualname', code.co_name)}}\\n"
    if entry not in seen:
        seen.add(entry)
        with open(OUT, "a") as file:
            file.write(entry)

def carries(value):
    if isinstance(value, float):
        return "value" if value == DECAY else None
    if isinstance(value, dict):
        if "__key__" in value:
            return "sample"
        return "sample" if type(value.get("image")).__name__ == "Tensor" else None
    kind = type(value)
    if kind.__name__ == "Failure" or isinstance(value, BaseException):
        return "error" if "broken on purpose" in str(value) else None
    if kind.__name__ == "Piece" and kind.__module__ == "clip_train.engine":
        return None
    if isinstance(value, (list, tuple)) and value and not isinstance(value, str):
        return carries(value[0]) if not isinstance(value[0], (list, tuple)) else None
    return CARRIERS.get(kind.__name__)

def profile(frame, event, argument):
    if event != "return":
        return
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGES) or code.co_name in HIDDEN:
        return
    if "__qualname__" in frame.f_locals:
        return  # the body of a class
    for value in list(frame.f_locals.values()):
        journey = carries(value)
        if journey:
            note(journey, code)

threading.setprofile(profile)
sys.setprofile(profile)
"""
FAULT = """
import importlib.machinery, sys
class AfterImport(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "clip_train.trainer":
            return None
        spec = super().find_spec(name, path, target)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            record = module.Trainer._record
            def faulty(self, *args):
                if self.step == 2:
                    raise RuntimeError("broken on purpose")
                return record(self, *args)
            module.Trainer._record = faulty
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, AfterImport)
"""
RECIPE = """\
run: {{name: journeys, dir: {folder}/run, steps: 4, seed: 3}}
model: {{name: {folder}/model.json}}
data: {{train: "{train}", workers: 1, lanes: 1}}
batch: {{global_size: 16, micro_size: 8}}
optim: {{lr: 1e-3, weight_decay: {decay}}}
schedule: {{warmup_steps: 0}}
checkpoint: {{every_steps: 1, remote: "file://{folder}/store/run"}}
log: {{tensorboard: false, progress: false}}
engine: {{kind: fsdp}}
"""
MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def measure(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Journey -> (file, function) of each that it meets."""
    from clip_tools.demo import shapes

    (folder / "model.json").write_text(json.dumps(MODEL))
    train = shapes(folder / "shapes", 64, per_shard=32).train
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder, train=train, decay=DECAY))
    met = folder / "met"
    met.touch()

    def run(*overrides: str, fault: str = "") -> int:
        site = folder / ("faulty" if fault else "site")
        site.mkdir(exist_ok=True)
        tracer = TRACER.format(root=str(ROOT), out=str(met), decay=DECAY)
        (site / "sitecustomize.py").write_text(fault + tracer)
        env = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-m", "launcher", "train", str(recipe), *overrides]
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
        if bool(done.returncode) != bool(fault):
            sys.exit(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr}")
        return done.returncode

    run()
    subprocess.run(["rm", "-r", str(folder / "run")], check=True)  # resume from the store
    run("run.steps=5", "checkpoint.allow_changed_recipe=true")
    run("run.steps=8", f"run.dir={folder}/broken", "checkpoint.remote=null", fault=FAULT)
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in sorted(set(met.read_text().splitlines())):
        journey, place, function = line.split("\t")
        found[journey].append((place, function))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="every function too")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    over = 0
    print("| journey | functions | modules | at most |\n|---|---|---|---|")
    for journey, limit in LIMITS.items():
        functions = found[journey]
        modules = {place for place, _ in functions}
        print(f"| {journey} | {len(functions)} | {len(modules)} | {limit} |")
        over += len(functions) > limit
    if options.list:
        for journey, functions in found.items():
            print(f"\n{journey}")
            for place, function in functions:
                print(f"  {place}  {function}")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
