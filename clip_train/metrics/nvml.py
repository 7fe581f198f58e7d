"""The state of GPUs by NVML, NVIDIA's management library, which every driver installs.

It is called through ctypes: the functions below have kept their form for ten years, and another
package would have to be installed on every node. Without the library, or without a GPU, `open_nvml`
returns None. A number that a GPU does not know is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from clip_train.callbacks import Callback

LIBRARY = "libnvidia-ml.so.1"
# of nvml.h
UNCORRECTED, VOLATILE = 1, 0  # errors of memory; since the driver was loaded
SM_CLOCK = 1
TEMPERATURE_OF_GPU = 0
IDLE = 0x1  # a reason for low clocks that is none to worry about
# Reasons for low clocks that make a GPU slower than its equals. A cap by power (0x4) is usual under
# full load, and a user may have set clocks (0x2).
THROTTLED = {
    0x8: "hardware slowdown (heat, or power supply)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake (the node's power supply)",
}
SLOW_CLOCK = 0.6  # of the highest clock, while it computes
BUSY_PERCENT = 50  # of the time; a GPU that computes less may lower its clock
READ_SECONDS = 10.0  # between readings during training


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment."""

    index: int  # of NVML, which numbers all GPUs of the node
    name: str
    uncorrected_errors: int | None  # of ECC, since the driver was loaded
    remap_pending: bool | None  # rows of memory are replaced at the next reset
    remap_failed: bool | None  # there are no rows left
    reasons: int | None  # for the present clocks, as bits
    sm_mhz: int | None
    most_sm_mhz: int | None
    utilization_percent: int | None
    power_watts: float | None
    temperature_celsius: int | None

    def throttled(self) -> list[str]:
        return [text for bit, text in THROTTLED.items() if (self.reasons or 0) & bit]

    def problems(self) -> list[tuple[str, str]]:
        """Each with its remedy."""
        found = []
        if self.uncorrected_errors:
            found.append(
                (
                    f"{self.uncorrected_errors} uncorrected ECC errors since its driver was loaded",
                    "reset it (nvidia-smi -r) or restart the node; replace it if they come again",
                )
            )
        if self.remap_failed:
            found.append(("no rows of memory are left to replace broken ones", "have it replaced"))
        elif self.remap_pending:
            found.append(
                ("broken rows of memory are replaced at its next reset", "nvidia-smi -r, once idle")
            )
        throttled = self.throttled()
        if throttled:
            heat = "" if self.temperature_celsius is None else f" at {self.temperature_celsius} C"
            found.append(
                (
                    f"throttled{heat}: {', '.join(throttled)}",
                    "check its cooling and power (nvidia-smi -q -d PERFORMANCE), or exclude the node",
                )
            )
        elif self._is_slow():
            found.append(
                (
                    f"computes at {self.sm_mhz} of {self.most_sm_mhz} MHz",
                    "check nvidia-smi -q -d CLOCK: locked clocks, or a power limit (-pl)",
                )
            )
        return found

    def _is_slow(self) -> bool:
        if self.sm_mhz is None or not self.most_sm_mhz:
            return False
        busy = (self.utilization_percent or 0) >= BUSY_PERCENT and not (self.reasons or 0) & IDLE
        return busy and self.sm_mhz < SLOW_CLOCK * self.most_sm_mhz


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """The library, initialized. Its functions may be called from any thread."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def count(self) -> int:
        return self._number(ctypes.c_uint, "nvmlDeviceGetCount_v2") or 0

    def states(self) -> list[GpuState | None]:
        """Of all GPUs, by index; None: one that does not answer."""
        handles = map(self.handle, range(self.count()))
        return [
            None if handle is None else self.state(handle, index)
            for index, handle in enumerate(handles)
        ]

    def handle(self, index: int) -> Any:
        """None for a GPU that does not answer: it is counted, but has fallen off the bus."""
        handle = ctypes.c_void_p()
        done = self._call(
            "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)
        )
        return handle if done else None

    def is_divided(self) -> bool:
        """Whether a GPU is divided by MIG. Its parts are GPUs to Slurm and CUDA, and not to `count`."""
        modes = [ctypes.c_uint(), ctypes.c_uint()]  # now, and from the next reset on
        for handle in filter(None, map(self.handle, range(self.count()))):
            known = self._call("nvmlDeviceGetMigMode", handle, *map(ctypes.byref, modes))
            if known and modes[0].value:
                return True
        return False

    def handle_of(self, uuid: str) -> Any:
        """uuid: as torch gives it. None if no GPU has it."""
        handle = ctypes.c_void_p()
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        done = self._call("nvmlDeviceGetHandleByUUID", name, ctypes.byref(handle))
        return handle if done else None

    def state(self, handle: Any, index: int = 0) -> GpuState:
        number = partial(self._number, ctypes.c_uint)
        rows = [ctypes.c_uint() for _ in range(4)]  # correctable, uncorrectable, pending, failed
        remaps = self._call("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
        errors, volatile = ctypes.c_int(UNCORRECTED), ctypes.c_int(VOLATILE)
        utilization = _Utilization()
        knows_use = self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(utilization))
        milliwatts = number("nvmlDeviceGetPowerUsage", handle)
        name = ctypes.create_string_buffer(96)
        self._call("nvmlDeviceGetName", handle, name, ctypes.c_uint(len(name)))
        return GpuState(
            index=index,
            name=name.value.decode(errors="replace"),
            uncorrected_errors=self._number(
                ctypes.c_ulonglong, "nvmlDeviceGetTotalEccErrors", handle, errors, volatile
            ),
            remap_pending=bool(rows[2].value) if remaps else None,
            remap_failed=bool(rows[3].value) if remaps else None,
            # the name that all drivers have; newer ones call it EventReasons too
            reasons=self._number(
                ctypes.c_ulonglong, "nvmlDeviceGetCurrentClocksThrottleReasons", handle
            ),
            sm_mhz=number("nvmlDeviceGetClockInfo", handle, ctypes.c_int(SM_CLOCK)),
            most_sm_mhz=number("nvmlDeviceGetMaxClockInfo", handle, ctypes.c_int(SM_CLOCK)),
            utilization_percent=utilization.gpu if knows_use else None,
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=number(
                "nvmlDeviceGetTemperature", handle, ctypes.c_int(TEMPERATURE_OF_GPU)
            ),
        )

    def _call(self, name: str, *arguments: Any) -> bool:
        """Whether it succeeded: an older driver lacks a function, a GPU does not support it."""
        function = getattr(self._library, name, None)
        return function is not None and function(*arguments) == 0

    def _number(self, kind: Any, name: str, *arguments: Any) -> Any:
        """What the function writes to its last argument; None if it fails."""
        value = kind()
        return value.value if self._call(name, *arguments, ctypes.byref(value)) else None


def open_nvml(name: str = LIBRARY) -> Nvml | None:
    """name: of the library, or its path."""
    with contextlib.suppress(OSError, AttributeError):  # no library, or another one of this name
        library = ctypes.CDLL(name)
        if library.nvmlInit_v2() == 0:
            return Nvml(library)
    return None


class GpuReadings(Callback):
    """Adds `gpu_utilization_percent`, `gpu_power_watts` and `gpu_temperature_celsius` to the records,
    and `gpu_throttled`, in words, while the GPU is. A thread reads them, so no step waits."""

    def __init__(self, read: Callable[[], GpuState], seconds: float = READ_SECONDS) -> None:
        self._read, self._seconds = read, seconds
        self._latest: dict[str, Any] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            state = self._read()
            values = {
                "gpu_utilization_percent": state.utilization_percent,
                "gpu_power_watts": state.power_watts,
                "gpu_temperature_celsius": state.temperature_celsius,
                "gpu_throttled": ", ".join(state.throttled()) or None,
            }
            self._latest = {name: value for name, value in values.items() if value is not None}
            if self._closed.wait(self._seconds):
                return

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        record.update(self._latest)

    def close(self) -> None:
        self._closed.set()


def gpu_readings(uuid: str) -> list[Callback]:
    """A `GpuReadings` of the GPU with this UUID, as torch gives it; none without NVML."""
    nvml = open_nvml()
    handle = nvml.handle_of(uuid) if nvml is not None and uuid else None
    if nvml is None or handle is None:
        return []
    return [GpuReadings(partial(nvml.state, handle))]
