"""A smaller student learns from a teacher's softmaxes beside CLIP's loss, as OpenCLIP's distillation does.

    python examples/distillation.py [FOLDER] [key.path=value ...]

metrics.jsonl has both halves of the loss: clip_loss and distill_loss.
"""

import json
import subprocess
import sys
from pathlib import Path

from clip_tools.demo import shapes


def clip_train(*line: str) -> None:
    """As a shell would start it."""
    print("$ clip-train", *line, flush=True)
    subprocess.run([sys.executable, "-m", "launcher", *line], check=True)


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/distillation")
data = shapes(folder / "data", 2000)
recipe, student = folder / "recipe.yaml", folder / "student.json"
recipe.write_text(f"""\
run: {{steps: 60}}
model: {{name: tiny}}
data: {{train: "{data.train}", val: "{data.val}", workers: 1}}
batch: {{global_size: 128, micro_size: 32}}
optim: {{lr: 2e-3}}
schedule: {{warmup_steps: 10}}
evaluate: {{zero_shot_classes: "{data.classes}", retrieval: false}}
""")
student.write_text(json.dumps({
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}))  # fmt: skip

teacher, run = folder / "teacher", folder / "student"
clip_train("train", str(recipe), f"run.dir={teacher}", *sys.argv[2:])
clip_train("export", str(recipe), f"run.dir={teacher}")
clip_train(
    "train",
    str(recipe),
    f"run.dir={run}",
    f"model.name={student}",
    f"model.teacher={teacher}/export",
    *sys.argv[2:],
)
steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
for step in (steps[0], steps[-1]):
    print(
        f"step {step['step']}: CLIP's loss {step['clip_loss']:.3f}, the teacher's {step['distill_loss']:.3f}"
    )
