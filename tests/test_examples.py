"""The programs of examples/, run as they stand on a CPU, small."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import tolerances
from tests.documents import ROOT
from tests.launcher.conftest import clean_environment, finish
from tests.warm import Command

EXAMPLES = ROOT / "examples"
STEPS = "run.steps=12", "schedule.warmup_steps=2", "log.tensorboard=false", "data.workers=0"


def run_example(name: str, *arguments: str | Path) -> str:
    """What `python examples/NAME ...` prints."""
    line = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        line, env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
@pytest.mark.engine
def test_img2dataset_to_an_exported_model(tmp_path):
    out = run_example("img2dataset.py", tmp_path / "shards", *STEPS)
    assert "3 shards, 600 samples" in out, out
    names = {file.name for file in (tmp_path / "shards").iterdir()}
    assert {"00002.tar", "00002_stats.json", "00002.parquet"} <= names
    assert len(metrics(tmp_path / "run")) == 12
    assert (
        load_file(tmp_path / "run" / "export" / "open_clip_model.safetensors")["logit_scale"].shape
        == ()
    )


@pytest.mark.full
@pytest.mark.engine
def test_lit(tmp_path):
    """The image tower stays what it was to the bit, and the text tower does not."""
    run_example("lit.py", tmp_path, *STEPS)
    status, out = finish(
        Command(["export", str(tmp_path / "first")], env=clean_environment(), cwd=tmp_path)
    )
    assert status == 0, out
    before, after = (
        load_file(tmp_path / run / "export" / "open_clip_model.safetensors")
        for run in ("first", "lit")
    )
    for name, tensor in after.items():
        if name != "logit_scale":
            assert np.array_equal(before[name], tensor) == name.startswith("visual."), name


@pytest.mark.full
@pytest.mark.engine
def test_distillation(tmp_path):
    out = run_example("distillation.py", tmp_path, *STEPS)
    assert re.search(r"step 12: CLIP's loss \d\.\d+, the teacher's \d\.\d+", out), out
    first, *_, last = metrics(tmp_path / "student")
    assert last["loss"] < first["loss"]


@pytest.mark.full
@pytest.mark.engine
def test_memory_bank(tmp_path):
    out = run_example("memory_bank.py", tmp_path, *STEPS, "loss.bank_warmup_steps=4")
    assert "with 256 pairs in the bank" in out, out


def losses_of(line: list[str], folder: Path) -> list[float]:
    # for Lightning's torchmetrics, in every process that it starts
    (folder / "sitecustomize.py").write_text("import tests.peers.torchvision_shim\n")
    paths = f"{folder}{os.pathsep}{ROOT}"
    environ = {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    line = [sys.executable, *line]
    done = subprocess.run(
        line, env=environ, cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        float(each.rsplit(" ", 1)[1])
        for each in done.stdout.splitlines()
        if each.startswith("step ")
    ]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LOOPS = {
    "accelerate": (
        [str(EXAMPLES / "accelerate_loop.py")],
        [*TORCHRUN, str(EXAMPLES / "accelerate_loop.py")],
    ),
    "transformers": (
        [str(EXAMPLES / "hf_trainer.py")],
        [*TORCHRUN, str(EXAMPLES / "hf_trainer.py")],
    ),
    "sentence_transformers": (
        [str(EXAMPLES / "sentence_transformers_trainer.py")],
        [*TORCHRUN, str(EXAMPLES / "sentence_transformers_trainer.py")],
    ),
    "lightning": (
        [str(EXAMPLES / "lightning_loop.py")],
        [str(EXAMPLES / "lightning_loop.py"), "2"],
    ),
}


@pytest.mark.distributed
@pytest.mark.parametrize("package", LOOPS)
def test_a_loop_in_another_library(package, tmp_path):
    """It learns, and on two ranks its curve is that of one: the global batch is the same."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    one, two = (losses_of(line, tmp_path) for line in LOOPS[package])
    assert len(one) == 10 and one[-1] < 0.7 * one[0]
    assert two == pytest.approx(one, rel=tolerances.loss(10), abs=1.01e-4)  # as printed


def test_sentence_transformers_curve_is_that_of_its_plain_loss(tmp_path):
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence_transformers is not installed: pip install sentence-transformers")
    line, _ = LOOPS["sentence_transformers"]
    exact, plain = losses_of(line, tmp_path), losses_of([*line, "plain"], tmp_path)
    assert len(exact) == 10
    assert exact == pytest.approx(plain, rel=tolerances.loss(10), abs=1.01e-4)  # as printed


@pytest.mark.engine
@pytest.mark.parametrize("program", ["own_loop.py", "lightning_loader.py"])
def test_a_foreign_loop_is_killed_and_continues_elsewhere(program, tmp_path, data):
    """The same batches and losses, on moved shards and with other workers."""
    if program.startswith("lightning") and importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed: pip install lightning")
    (tmp_path / "sitecustomize.py").write_text("import tests.peers.torchvision_shim\n")
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def started(shards: Path, state: str, workers: int) -> subprocess.Popen:
        (tmp_path / state).mkdir(exist_ok=True)
        where = (f"{shards}/*.tar", str(tmp_path / state), "9", str(workers))
        line = [sys.executable, str(EXAMPLES / program), *where]
        return subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, text=True)

    def steps(process: subprocess.Popen) -> dict[str, str]:
        """What was printed about each step; the process has ended."""
        out, _ = process.communicate(timeout=900)
        lines = [line.split(" ", 2)[1:] for line in out.splitlines() if line.startswith("step ")]
        return {step: rest for step, rest in lines}  # noqa: C416

    shards = Path(data.train).parent
    whole = started(shards, "whole", workers=0)
    expected = steps(whole)
    assert whole.returncode == 0 and list(expected) == [str(step) for step in range(1, 10)]
    killed = started(shards, "killed", workers=0)
    for line in killed.stdout or ():
        if line.startswith("step 6"):
            break
    killed.kill()
    killed.communicate()
    moved = shutil.copytree(shards, tmp_path / "moved")
    shutil.copytree(tmp_path / "killed", tmp_path / "elsewhere")
    resumed = started(moved, "elsewhere", workers=1)
    found = steps(resumed)
    assert resumed.returncode == 0 and min(map(int, found)) == 5, found
    assert found == {step: expected[step] for step in found}


PEERS = "scripts/setup_peers.sh and .venv-peers/bin/python"
LACKED = {
    "command.py": ("matplotlib", "pip install 'clip-train[bench]'"),
    "data.py": ("matplotlib", "pip install 'clip-train[bench]'"),
    "coca.py": ("tokenizers", PEERS),
    "cached_ranking.py": ("sentence_transformers", "pip install sentence-transformers==6.2.0"),
}


@pytest.mark.parametrize("name", LACKED)
def test_a_benchmark_names_the_extra_that_it_lacks(tmp_path, name):
    package, remedy = LACKED[name]
    missing = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')\n"
    (tmp_path / f"{package}.py").write_text(missing)
    line = [sys.executable, f"benchmarks/{name}", "--quick"]
    done = subprocess.run(
        line,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"{name} needs {package}: {remedy}\n"


def test_every_extra_that_a_message_names_exists():
    project = (ROOT / "pyproject.toml").read_text()
    extras = project.partition("[project.optional-dependencies]")[2].partition("[tool.")[0]
    known = set(re.findall(r"^(\w+) = \[", extras, re.M))
    named = {
        (str(file.relative_to(ROOT)), extra)
        for folder in ("benchmarks", "clip_tools", "clip_train", "docs", "launcher", "scripts")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".md", ".sh")
        for names in re.findall(r"(?:clip-train|\{ROOT\})\[([a-z,]+)\]", file.read_text())
        for extra in names.split(",")
    }
    assert len(named) > 10 and {each for each in named if each[1] not in known} == set()


TRACKERS = {
    "mlflow": (
        "MLflow",
        """
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
losses = [metric.value for metric in client.get_metric_history(run.info.run_id, "loss")]
print(json.dumps([losses, run.data.metrics["image_to_text_R_at_1"], run.info.status]))
""",
    ),
    "trackio": (
        "Trackio",
        """
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("clip-train")
rows = SQLiteStorage.get_logs("clip-train", run.name, run_id=run.id)
losses = [row["loss"] for row in rows if "loss" in row]
(recall,) = [row["image_to_text_R@1"] for row in rows if "image_to_text_R@1" in row]
print(json.dumps([losses, recall, "FINISHED"]))
""",
    ),
}


@pytest.mark.engine
@pytest.mark.parametrize("package", TRACKERS)
def test_a_tracker_has_the_numbers_of_the_run(package, tmp_path, recipe, data):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    name, read = TRACKERS[package]
    environ = clean_environment() | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    keys = ["run.steps=3", "schedule.warmup_steps=0", f"data.val={data.val}"]
    train = ["-m", "launcher", "train", str(recipe), *keys]
    out = ""
    for line in (
        [*train, f"log.callbacks=[examples.trackers.{name}]"],
        ["-c", f"import json{read}"],
    ):
        done = subprocess.run(
            [sys.executable, *line],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        out = done.stdout
        assert done.returncode == 0, done.stdout + done.stderr
        assert "log.callbacks" not in done.stderr, done.stderr
    losses, recall, status = json.loads(out.splitlines()[-1])
    assert losses == pytest.approx([record["loss"] for record in metrics(tmp_path / "run")])
    scores = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[-1])
    assert recall == pytest.approx(scores["image_to_text_R@1"]) and status == "FINISHED"
