"""What teachers do to a small student on the demo's shapes: none, one, two online, two from reinforced shards.

    python benchmarks/reinforced.py [FOLDER]      # half an hour on two busy cores

Two teachers are trained for 150 steps, then students of half their width for 80 steps, with three seeds.
Prints zero-shot accuracy over captions that were never seen in training.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from clip_tools.demo import shapes

RECIPE = """\
run: {{steps: 150}}
model: {{name: {teacher}}}
data: {{train: "{train}", val: "{val}", workers: 0, lanes: 4}}
batch: {{global_size: 128, micro_size: 64, kept_graphs: all}}
optim: {{lr: 2e-3}}
schedule: {{warmup_steps: 10}}
evaluate: {{zero_shot_classes: "{classes}", retrieval: false}}
checkpoint: {{every_steps: 1000}}
log: {{progress: false}}
"""


def architecture(width: int, layers: int) -> str:
    vision = {"image_size": 32, "layers": layers, "width": width, "head_width": 32, "patch_size": 8}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    return json.dumps({"embed_dim": width, "vision_cfg": vision, "text_cfg": text})


def clip_train(*line: str) -> None:
    subprocess.run([sys.executable, "-m", "launcher", *line], check=True, stdout=sys.stderr)


def last(file: Path) -> dict[str, float]:
    return json.loads(file.read_text().splitlines()[-1])


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/reinforced")
    data = shapes(folder / "data", 2000)
    recipe, made = str(folder / "recipe.yaml"), str(folder / "made")
    (folder / "teacher.json").write_text(architecture(64, 2))
    (folder / "student.json").write_text(architecture(32, 1))
    places = {"train": data.train, "val": data.val, "classes": data.classes}
    Path(recipe).write_text(RECIPE.format(teacher=folder / "teacher.json", **places))
    teachers, scales = [], []
    for seed in (0, 1):
        run = folder / f"teacher{seed}"
        clip_train("train", recipe, f"run.dir={run}", f"run.seed={seed}")
        clip_train("export", recipe, f"run.dir={run}")
        teachers.append(f"{run}/export")
        scales.append(last(run / "metrics.jsonl")["logit_scale"])
        print(f"teacher {seed}:", last(run / "eval.jsonl")["zero_shot_top1"], flush=True)
    options = ("--augmentations", "4", "--crop", "0.9", "--to", made)
    clip_train("reinforce", data.train, "--teacher", ",".join(teachers), *options)
    weights = "loss.distill_weights=[0.25,0.75]"
    ways = {
        "alone": [],
        "one teacher": [f"model.teacher={teachers[0]}", weights],
        "two teachers": [f"model.teacher=[{', '.join(teachers)}]", weights],
        "two, from shards": [
            f"data.train={made}/*.tar", "data.reinforced=[64,64]", f"loss.teacher_scales={scales}", weights,
        ],
    }  # fmt: skip
    for seed in (5, 6, 7):
        for name, more in ways.items():
            run = folder / f"{name.replace(' ', '-')}{seed}"
            short = (f"run.seed={seed}", f"model.name={folder / 'student.json'}", "run.steps=80")
            clip_train("train", recipe, f"run.dir={run}", *short, *more)
            found = last(run / "eval.jsonl")
            print(name, seed, found["zero_shot_top1"], found["zero_shot_top5"], flush=True)


if __name__ == "__main__":
    main()
