"""A memory bank: features of past batches are negatives beside the exact global batch (ContAccum, arXiv 2406.12356).

    python examples/memory_bank.py [FOLDER] [key.path=value ...]

The same small run without and with one. metrics.jsonl has bank_entries. Banks that count too early ruin a run: mind
the warm-up.
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


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/memory-bank")
data = shapes(folder / "data", 2000)
recipe = folder / "recipe.yaml"
recipe.write_text(f"""\
run: {{steps: 60}}
model: {{name: tiny}}
data: {{train: "{data.train}", val: "{data.val}", workers: 1}}
batch: {{global_size: 64, micro_size: 32}}
optim: {{lr: 1e-3}}
schedule: {{warmup_steps: 10}}
evaluate: {{zero_shot_classes: "{data.classes}", retrieval: false}}
""")

clip_train("train", str(recipe), f"run.dir={folder}/plain", *sys.argv[2:])
bank = ("loss.kind=memory_bank", "loss.bank_size=256", "loss.bank_warmup_steps=20")
clip_train("train", str(recipe), f"run.dir={folder}/bank", *bank, *sys.argv[2:])

plain, last = (
    json.loads((folder / run / "metrics.jsonl").read_text().splitlines()[-1])
    for run in ("plain", "bank")
)
print(f"plain: loss {plain['loss']:.3f}")
print(f"with {last['bank_entries']:.0f} pairs in the bank: loss {last['loss']:.3f}")
