"""LiT (arXiv 2111.07991): a text tower learns to fit an image tower that is trained already, and stays as it is.

    python examples/lit.py [FOLDER] [key.path=value ...]

The image tower comes from a first run here; with weights of your own: model.init_image_from=PLACE (docs/weights.md).
"""

import subprocess
import sys
from pathlib import Path

from clip_tools.demo import shapes


def clip_train(*line: str) -> None:
    """As a shell would start it."""
    print("$ clip-train", *line, flush=True)
    subprocess.run([sys.executable, "-m", "launcher", *line], check=True)


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lit")
data = shapes(folder / "data", 2000)
recipe = folder / "recipe.yaml"
recipe.write_text(f"""\
run: {{steps: 60}}
model: {{name: tiny}}
data: {{train: "{data.train}", val: "{data.val}", workers: 1}}
batch: {{global_size: 128, micro_size: 32}}
optim: {{lr: 2e-3}}
schedule: {{warmup_steps: 10}}
evaluate: {{zero_shot_classes: "{data.classes}", retrieval: false}}
""")

first, lit = folder / "first", folder / "lit"
clip_train("train", str(recipe), f"run.dir={first}", *sys.argv[2:])
locked = (f"model.init_image_from={first}", "model.lock_image=true", "run.seed=1")
clip_train("train", str(recipe), f"run.dir={lit}", *locked, *sys.argv[2:])
clip_train("export", str(lit))
