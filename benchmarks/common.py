"""What the benchmarks share: targets, tables, the environment they ran in."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def small_clip() -> Any:
    """The Architecture of a CLIP on which real steps take milliseconds: 32 px, contexts of 12 tokens."""
    from clip_train.models.config import Architecture

    return Architecture.model_validate(
        {
            "embed_dim": 32,
            "vision_cfg": {
                "image_size": 32,
                "layers": 2,
                "width": 64,
                "head_width": 32,
                "patch_size": 8,
            },
            "text_cfg": {
                "context_length": 12,
                "vocab_size": 64,
                "width": 48,
                "heads": 2,
                "layers": 2,
            },
        }
    )


def base_ds_config(**sections: dict[str, Any]) -> str:
    """A file for engine.ds_config that sets these and nothing else."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as f:
        json.dump(sections, f)
    return f.name


def parser(description: str) -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--json", metavar="FILE", help="write rows, targets and environment there")
    out.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    out.add_argument("--quick", action="store_true", help="end within a minute, with fewer rows")
    return out


def output_of(*line: str, threads: int | None = None) -> str:
    """What this Python prints with these arguments. threads: of torch; None: as many as it takes.
    RuntimeError with the end of its errors."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(
        [sys.executable, *line], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{line[:4]} ended with {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout


def find_peer(wanted: str | None, module: str) -> str | None:
    """A Python that has OpenCLIP and can import `module` of it: `wanted`, that of `.venv-peers`, or this one."""
    here = ROOT / ".venv-peers" / "bin" / "python"
    for python in [wanted] if wanted else [str(here), sys.executable]:
        code = f"import tests.peers.torchvision_shim, {module}"
        try:
            found = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, check=False)
        except OSError:
            continue
        if found.returncode == 0:
            return python
    return None


def find_openclip() -> bool:
    """Whether it can be imported: from here, or beside this environment's own packages from `.venv-peers`."""
    if importlib.util.find_spec("open_clip") is None:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        sys.path.append(str(ROOT / ".venv-peers" / "lib" / version / "site-packages"))
        importlib.invalidate_caches()
    return importlib.util.find_spec("open_clip") is not None


PEERS = "scripts/setup_peers.sh and .venv-peers/bin/python"
# Optional packages and the command that installs them.
EXTRAS = {
    "matplotlib": "pip install 'clip-train[bench]'",
    "sklearn": "pip install 'clip-train[test]'",
    "torchao": "pip install 'clip-train[torchao]'",
    "triton": "pip install triton==3.7.*, for torch 2.13",
    "sentence_transformers": "pip install sentence-transformers==6.2.0",
    "colpali_engine": "the first lines of benchmarks/embedders.py",
    "grad_cache": "the first lines of benchmarks/embedders.py",
    "tokenizers": PEERS,
    "transformers": PEERS,
    "open_clip": f"pip install 'clip-train[peers]', or {PEERS}",
    "open_clip_train": f"pip install 'clip-train[peers]', or {PEERS}",
}  # fmt: skip


def _name_the_extra(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Uncaught: a missing optional package is one line and exit status 2."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name not in EXTRAS:
        return sys.__excepthook__(kind, error, trace)
    print(f"{Path(sys.argv[0]).name} needs {name}: {EXTRAS[name]}", file=sys.stderr, flush=True)
    os._exit(2)


sys.excepthook = _name_the_extra


def processor() -> tuple[str, str]:
    """The processor's model, and its instruction sets that change the speed or rounding of products."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    values = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    name = f"{values.get('model name', platform.machine())}"
    if "cpu family" in values:
        name += f" (family {values['cpu family']}, model {values['model']})"
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile")
    return name, " ".join(x for x in wanted if x in values.get("flags", "").split())


def products(size: int = 1024, rounds: int = 9) -> dict[str, float]:
    """GFLOP/s of one thread in square float32 products: by MKL, which torch takes, and by oneDNN."""
    a, b = torch.randn(2, size, size)
    ways = {"MKL": lambda: torch.mm(a, b.T)}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        ways["oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name].append(time.process_time() - start)
    torch.set_num_threads(threads)
    return {name: 2e-9 * size**3 / min(taken) for name, taken in seconds.items()}


def describe_products(measured: dict[str, float]) -> str:
    name, sets = processor()
    rates = ", ".join(f"{way} {rate:.0f}" for way, rate in measured.items())
    return f"processor: {name}; {sets}; float32 products of one thread, GFLOP/s: {rates}"


def environment() -> dict[str, str]:
    """Where the numbers come from."""

    def package(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    cuda = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": package("deepspeed"),
        "device": torch.cuda.get_device_name()
        if cuda
        else f"CPU, {len(os.sched_getaffinity(0))} cores",
        "processor": ", ".join(processor()),
        "command": " ".join(["python", *sys.argv]),
    }


def commit() -> str:
    out = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return out.stdout.strip() or "unknown"


def finish(
    name: str,
    rows: list[dict[str, Any]],
    targets: dict[str, str],
    missed: list[str],
    args: argparse.Namespace,
    brief: list[dict[str, Any]] | None = None,
) -> int:
    """Print the table, write the JSON, and tell the exit status: 1 where a target was missed.

    brief: what Markdown and the JSON have instead of `rows`.
    """
    print_table(name, rows) if not args.markdown else print(markdown(brief or rows))
    for target, meaning in targets.items():
        print(f"target: {target}: {meaning}")
    if args.json:
        content = {
            "name": name,
            "rows": brief or rows,
            "targets": targets,
            "environment": environment(),
            "commit": commit(),
        }
        Path(args.json).write_text(json.dumps(content, indent=2) + "\n")
    for line in missed:
        print(f"MISSED: {line}")
    print("all targets met" if not missed else f"{len(missed)} targets missed")
    return 1 if missed else 0


def rows_of_others(file: str | None, column: str, values: list[str]) -> list[dict[str, Any]]:
    """The rows of a file that `--json` has written before whose `column` has none of these values: they stay."""
    if file is None or not Path(file).exists():
        return []
    return [row for row in json.loads(Path(file).read_text())["rows"] if row[column] not in values]


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"{name} ({commit()}, {environment()['device']}, torch {torch.__version__})"
    )
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(escape(format_cell(value)) for value in row.values()))
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [[format_cell(value).replace("|", "\\|") for value in row.values()] for row in rows]
    head = [list(rows[0]), ["---"] * len(rows[0])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in head + lines)


def format_cell(value: Any) -> str:
    if isinstance(value, float):
        return (
            f"{value:.1e}"
            if value != 0 and (abs(value) < 1e-2 or abs(value) >= 1e4)
            else f"{value:.3g}"
        )
    return str(value)
