"""GPUs of this machine without CUDA; eager loading; lists of archs (``native``, ``all-major``)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pytest_negativa.arch import ALL_MAJOR, SmArch, parse_arch, require_known
from pytest_negativa.errors import OptionError
from pytest_negativa.models.trace import Device
from pytest_negativa.storage.system import System

# CUdevice_attribute in cuda.h
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
# CUmoduleLoadingMode in cuda.h
_EAGER = 1
_RTLD_NOLOAD = 4
# What the kernel modules for discrete GPUs, for WSL and for Tegra create.
_DEVICE_NODES = ("nvidiactl", "dxg", "nvhost-gpu", "nvgpu")
_GPU_FACTS = Path("/proc/driver/nvidia/gpus")


def loaded_driver() -> Any:
    """The driver's library; tracing never brings it in where the program doesn't.

    Raises:
        OSError: this process has not loaded it.
    """
    return ctypes.CDLL("libcuda.so.1", mode=_RTLD_NOLOAD)


class DriverFacts:
    """Questions to libcuda. Valid only once the program itself has called ``cuInit``."""

    def __init__(self) -> None:
        self._cuda = loaded_driver()

    def _integer(self, function: str, *arguments: object) -> int | None:
        value = ctypes.c_int(0)
        if getattr(self._cuda, function)(ctypes.byref(value), *arguments):
            return None
        return value.value

    def devices(self) -> tuple[Device, ...]:
        """All devices that this process can use.

        Raises:
            OSError: the driver doesn't tell one of them, or none.
        """
        found = [self._device(index) for index in range(self._integer("cuDeviceGetCount") or 0)]
        known = tuple(device for device in found if device is not None)
        if not known or len(known) < len(found):
            raise OSError(f"it tells {len(known)} of {len(found)}")
        return known

    def _device(self, index: int) -> Device | None:
        device = self._integer("cuDeviceGet", index)
        if device is None:
            return None
        major = self._integer("cuDeviceGetAttribute", _COMPUTE_CAPABILITY_MAJOR, device)
        minor = self._integer("cuDeviceGetAttribute", _COMPUTE_CAPABILITY_MINOR, device)
        name = ctypes.create_string_buffer(256)
        identifier = ctypes.create_string_buffer(16)
        if (
            major is None
            or minor is None
            or self._cuda.cuDeviceGetName(name, len(name), device)
            or self._cuda.cuDeviceGetUuid_v2(identifier, device)
        ):
            return None
        return Device(
            name=name.value.decode("utf-8", "replace"),
            compute_capability=f"{major}.{minor}",
            uuid=f"GPU-{uuid.UUID(bytes=identifier.raw)}",
            cuda_version=self._integer("cuDriverGetVersion") or 0,
            driver_version=_driver_version(),
        )

    def loads_eagerly(self) -> bool:
        """Whether modules load whole, whatever of them is used (CUDA_MODULE_LOADING=EAGER)."""
        return self._integer("cuModuleGetLoadingMode") == _EAGER


def start_driver() -> DriverFacts:
    """Load the driver and call ``cuInit``, which makes no context.

    Raises:
        OSError: there is no driver, or it finds no GPU.
    """
    if status := ctypes.CDLL("libcuda.so.1").cuInit(0):
        raise OSError(f"cuInit gave error {status}")
    return DriverFacts()


def parse_archs(texts: Iterable[str], *, also_unknown: bool = False) -> tuple[SmArch, ...]:
    """Read archs and GPUs wherever a user may name some; each arch once.

    Args:
        texts: lists with commas of what ``arch.parse_arch`` reads, of ``all-major``
            (``arch.ALL_MAJOR``) and of ``native``, this machine's GPUs.
        also_unknown: take archs of no GPU that this release knows, too.

    Raises:
        OptionError: a word is no arch, no GPU has it, or ``native`` finds no GPU.
    """
    found: list[SmArch] = []
    for word in (part.strip() for text in texts for part in text.split(",")):
        if word.lower() == "native":
            found += map(parse_arch, _native())
        elif word.lower() == "all-major":
            found += ALL_MAJOR
        else:
            found.append(parse_arch(word) if also_unknown else require_known(parse_arch(word)))
    return tuple(dict.fromkeys(found))


def _native() -> list[str]:
    """The compute capabilities of this machine's GPUs.

    A process of its own asks: after ``cuInit``, no child that the tests fork could use CUDA. What
    traces its parent must not trace it.
    """
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_INJECTION64_PATH"}
    command = (sys.executable, "-m", __name__)
    done = subprocess.run(
        command,
        # Not taken for a program of the tests, see pages/watch/starts.h.
        env={**kept, "LD_AUDIT": ""},
        # -m searches the current folder first, which may have modules of other people.
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["the driver shows none"])[-1]
        why = last.removeprefix("OSError: ")
        raise OptionError(f"native: no GPU works on this machine ({why}); name the archs")
    return done.stdout.split()


def gpu_names(facts: Path = _GPU_FACTS) -> tuple[str, ...]:
    """The names of this machine's GPUs, hidden ones included; none if nothing tells them.

    Source: "The /proc filesystem" of the README of NVIDIA's driver.
    """
    found: list[str] = []
    for path in sorted(facts.glob("*/information")):
        with contextlib.suppress(OSError):
            found += re.findall(r"(?m)^Model:[ \t]*(.*\S)", path.read_text(errors="replace"))
    return tuple(found)


def has_gpu(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> bool:
    """Whether this machine has a GPU to trace on, found out without touching CUDA.

    Loading the driver would put it into every process of the session, even if no test needs it.
    True if a GPU's device node is there and the environment doesn't hide all GPUs."""
    # CUDA C++ Programming Guide, "CUDA Environment Variables": devices after an invalid
    # index are invisible, so an empty value or -1 hides all.
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any((devices / node).exists() for node in _DEVICE_NODES)


def driver_initialised() -> bool:
    """Whether this process has called ``cuInit``."""
    try:
        # cuda.h: CUDA_ERROR_NOT_INITIALIZED or another error before cuInit.
        return int(loaded_driver().cuDeviceGetCount(ctypes.byref(ctypes.c_int(0)))) == 0
    except (OSError, AttributeError):
        return False


def _driver_version() -> str | None:
    try:
        text = System.read_all("/proc/driver/nvidia/version").decode("ascii", "replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", text)
    return found[1] if found else None


if __name__ == "__main__":
    sys.stdout.write(" ".join(device.compute_capability for device in start_driver().devices()))
