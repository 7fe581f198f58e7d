import base64
import io
import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
from PIL import Image

from clip_train.metrics.report import write_report


def write_jsonl(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def step(i: int) -> dict:
    return {
        "step": i, "samples": 8 * i, "loss": None if i == 3 else 5.0 / i, "grad_norm": 1.0,
        "logit_scale": 14.0, "lr": 1e-3, "samples_per_second": 10.0, "step_seconds": 0.5,
        "data_wait_seconds": 0.1, "peak_memory_bytes": 2**30,
    }  # fmt: skip


def images(page: str) -> dict[str, Image.Image]:
    found = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,([^"]+)"', page)
    return {alt: Image.open(io.BytesIO(base64.b64decode(data))) for alt, data in found}


def test_a_whole_run(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [step(i) for i in range(1, 121)])
    write_jsonl(tmp_path / "eval.jsonl", [{"step": s, "zero_shot/top1": s / 200, "note": "x"} for s in (60, 120)])
    (tmp_path / "recipe.yaml").write_text("run: {name: <script>, seed: 7}\nmodel: {name: ViT-B-32}\n")
    (tmp_path / "VERDICT").write_text('DONE\n{"step": 120}\n')
    page = write_report(tmp_path, bad_samples={"no caption\tshard-7.tar": 12, "truncated\ta.tar": 1}).read_text()
    found = images(page)
    assert set(found) == {"training", "validation"}
    for image in found.values():
        assert image.size[0] > 800 and len(image.convert("L").getcolors(256)) > 10  # drawn, not blank
    for text in ("DONE", "120", "960", "5.0000, 0.0417", "zero_shot/top1", "0.6", "20.0% of it", "1.00 GiB",
                 "shard-7.tar", "no caption", "seed: 7", "ViT-B-32", "&lt;script&gt;"):  # fmt: skip
        assert text in page, text
    assert "<script>" not in page
    assert not re.search(r'(src|href)="(?!data:)', page)  # self-contained
    with Image.open(tmp_path / "loss.png") as loss:
        assert loss.size[0] > 500


def test_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    assert "No step has been recorded yet" in write_report(tmp_path).read_text()
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    assert set(images(write_report(tmp_path).read_text())) == {"training"}


def test_a_long_run_is_read_record_by_record(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [step(1)])
    write_report(tmp_path)  # what is imported and kept is not the run's
    write_jsonl(tmp_path / "metrics.jsonl", [step(i) for i in range(1, 15_001)])
    tracemalloc.start()
    page = write_report(tmp_path).read_text()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for text in ("15,000", "120,000", "5.0000, 0.0003", "2:05:00", "20.0% of it"):
        assert text in page, text
    assert most < 14 << 20  # with all records at once 25 MiB


def test_what_is_drawn_of_a_long_curve_has_its_extremes(tmp_path: Path) -> None:
    """One step of 15,000 at which the loss is far above all others, and one far below."""
    records = [{"step": i, "loss": {3456: 100.0, 12_345: -100.0}.get(i, i * 7919 % 1000 / 1000)} for i in range(15_000)]
    write_jsonl(tmp_path / "metrics.jsonl", records)
    write_report(tmp_path)
    pixels = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")).astype(int)
    blue = pixels[..., 2] - pixels[..., 0] > 20  # the curves; frame, grid and text are grey
    rows, columns = np.nonzero(blue)
    left, right = columns.min(), columns.max()
    for half, step in ((rows < rows.min() + 50, 3456), (rows > rows.max() - 50, 12_345)):
        at = (columns[half] - left) / (right - left) * 15_000
        assert abs(at - step).max() < 100, step
    assert rows.max() - rows.min() > pixels.shape[0] / 2
