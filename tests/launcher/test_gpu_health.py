"""GPUs by NVML: each planted fault of a library that answers as NVML does is named, a healthy node is not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clip_tools.doctor import expected_gpus, health_of_gpus
from clip_train.metrics.nvml import GpuReadings, Nvml, open_nvml
from tests.launcher.conftest import ROOT, clean_environment, until

FAULTS = (
    "NVML_GPUS",
    "NVML_THROTTLED",
    "NVML_ECC",
    "NVML_REMAP",
    "NVML_SLOW",
    "NVML_LOST",
    "NVML_MIG",
    "NVML_OLD",
)


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    file = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = ROOT / "tests" / "pretended" / "nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", file, source], check=True)
    return file


@pytest.fixture
def nvml(library, monkeypatch) -> Nvml:
    for name in FAULTS:
        monkeypatch.delenv(name, raising=False)
    found = open_nvml(str(library))
    assert found is not None
    return found


def test_a_healthy_node_is_no_warning(nvml):
    found = list(health_of_gpus(nvml, 2))
    assert [f.level for f in found] == ["ok", "ok"]
    assert found[1].message == "GPU 1 (Pretended H101), 345 MHz, 34 C"


@pytest.mark.parametrize(
    "fault, said",
    [
        (
            "NVML_THROTTLED",
            "throttled at 91 C: hardware slowdown (heat, or power supply), hardware",
        ),
        ("NVML_ECC", "3 uncorrected ECC errors since its driver was loaded"),
        ("NVML_REMAP", "broken rows of memory are replaced at its next reset"),
        ("NVML_SLOW", "computes at 600 of 1980 MHz"),
    ],
)
def test_a_fault_names_its_gpu_alone(nvml, monkeypatch, fault, said):
    monkeypatch.setenv(fault, "1")
    found = list(health_of_gpus(nvml, 2))
    assert [f.level for f in found] == ["ok", "warning"]
    assert found[1].message.startswith(f"GPU 1 (Pretended H101): {said}") and found[1].remedy


def test_a_missing_gpu_is_an_error(nvml, monkeypatch):
    monkeypatch.setenv("NVML_GPUS", "1")
    found = list(health_of_gpus(nvml, 2))
    assert [f.level for f in found] == ["error", "ok"]
    assert found[0].message == "NVML sees 1 of 2 GPUs"


def test_a_gpu_that_is_counted_but_does_not_answer_is_an_error(nvml, monkeypatch):
    """As after Xid 79: nvidia-smi says `Unable to determine the device handle`."""
    monkeypatch.setenv("NVML_LOST", "1")
    found = list(health_of_gpus(nvml, 2))
    assert [f.level for f in found] == ["ok", "error"]
    assert found[1].message == "GPU 1 does not answer NVML" and "fallen off" in found[1].remedy


def test_the_parts_of_a_gpu_are_not_missed(nvml, monkeypatch):
    """Slurm gives 7 parts of a GPU, and NVML counts one."""
    monkeypatch.setenv("NVML_GPUS", "1")
    monkeypatch.setenv("NVML_MIG", "0")
    assert [f.level for f in health_of_gpus(nvml, 7)] == ["ok"]


def test_a_library_of_this_name_that_is_another_one(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    file = tmp_path / "libother.so"
    line = [compiler, "-shared", "-o", file, "-xc", "/dev/null"]
    subprocess.run(line, check=True)
    assert open_nvml(str(file)) is None


def test_the_gpus_that_should_be_there(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert expected_gpus({}, tmp_path) == 2
    assert expected_gpus({"SLURM_GPUS_ON_NODE": "8"}, tmp_path) == 8


def test_an_old_driver_and_no_driver(nvml, monkeypatch):
    monkeypatch.setenv("NVML_OLD", "1")
    (state, _) = nvml.states()
    assert state.uncorrected_errors is state.remap_pending is state.power_watts is None
    assert state.temperature_celsius == 34 and state.problems() == []
    assert open_nvml("libnowhere.so.1") is None
    assert list(health_of_gpus(None, 8)) == []


def test_records_have_the_readings_of_the_ranks_own_gpu(nvml, monkeypatch):
    handle = nvml.handle_of("00000001")
    assert handle is not None and nvml.handle_of("no such GPU") is None
    readings = GpuReadings(lambda: nvml.state(handle), seconds=0.01)
    try:

        def record() -> dict:
            values: dict = {"step": 1}
            readings.after_step(values, [], {})
            return values

        assert until(lambda: len(record()) > 1)
        assert record() == {
            "step": 1,
            "gpu_utilization_percent": 0,
            "gpu_power_watts": 71.501,
            "gpu_temperature_celsius": 34,
        }
        monkeypatch.setenv("NVML_THROTTLED", "1")
        assert until(lambda: "hardware thermal slowdown" in record().get("gpu_throttled", ""))
    finally:
        readings.close()


@pytest.mark.full
def test_the_doctor_finds_the_library_of_the_driver(library, tmp_path):
    """The whole command, as on a node: the loader finds the library by its name."""
    environ = clean_environment() | {
        "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(ROOT), "NVML_THROTTLED": "0",
        "CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "3",
    }  # fmt: skip
    line = [sys.executable, "-m", "launcher", "doctor", "--json"]
    done = subprocess.run(
        line, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    found = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "health"]
    assert done.returncode == 1 and [f["level"] for f in found] == ["error", "warning", "ok"]
    assert "NVML sees 2 of 3 GPUs" in found[0]["message"] and "91 C" in found[1]["message"]
