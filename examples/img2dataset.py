"""From img2dataset's output to a trained, exported model, by the commands that one would type.

    python examples/img2dataset.py [FOLDER] [key.path=value ...]

FOLDER is where `img2dataset --output_format webdataset` has written; where there is none, a small one in the same
format is drawn: 00000.tar with .jpg, .txt and .json, 00000_stats.json, and 00000.parquet (which nothing here reads).
"""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
from pyarrow import parquet

from clip_tools.demo import shapes
from clip_train.data.tar import iter_samples, write_shards


def draw(folder: Path) -> None:
    """Captioned shapes, as img2dataset would have fetched them."""
    drawn = shapes(folder.with_name("drawn"), 600, per_shard=200)
    for shard, source in enumerate(sorted(Path(drawn.train).parent.glob("*.tar"))):
        samples, rows = [], []
        with source.open("rb") as file:
            for i, sample in enumerate(iter_samples(file)):
                key, caption = f"{shard:05d}{i:04d}", sample.members["txt"].decode()
                rows.append(
                    {
                        "key": key,
                        "url": f"https://x/{key}.jpg",
                        "caption": caption,
                        "status": "success",
                    }
                )
                samples.append(
                    {"__key__": key, "jpg": sample.members["jpg"], "txt": caption, "json": rows[-1]}
                )
        write_shards(folder, samples, len(samples), f"{shard:05d}.tar")
        stats = {"count": len(rows), "successes": len(rows), "failed_to_download": 0}
        (folder / f"{shard:05d}_stats.json").write_text(json.dumps(stats))
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{shard:05d}.parquet")


def clip_train(*line: str) -> None:
    """As a shell would start it."""
    print("$ clip-train", *line, flush=True)
    subprocess.run([sys.executable, "-m", "launcher", *line], check=True)


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/img2dataset/shards")
if not list(folder.glob("*.tar")):
    draw(folder)
run, recipe = folder.with_name("run"), folder.with_name("recipe.yaml")
recipe.write_text(f"""\
run: {{dir: {run}, steps: 60}}
model: {{name: tiny}}
data: {{train: "{folder}/*.tar", workers: 1}}
batch: {{global_size: 128, micro_size: 32}}
optim: {{lr: 2e-3}}
schedule: {{warmup_steps: 10}}
""")
clip_train("index", f"{folder}/*.tar")
clip_train("train", str(recipe), *sys.argv[2:])
clip_train("export", str(recipe))
