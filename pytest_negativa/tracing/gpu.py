"""Finds out, without touching CUDA, whether this machine has a GPU to trace on.

Loading the driver here would put it into every process of the session, even if no test needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

# What the kernel modules for discrete GPUs, for WSL and for Tegra create.
_DEVICE_NODES = ("nvidiactl", "dxg", "nvhost-gpu", "nvgpu")


_GPU_FACTS = Path("/proc/driver/nvidia/gpus")


def gpu_names(facts: Path = _GPU_FACTS) -> tuple[str, ...]:
    """The names of this machine's GPUs, hidden ones included; none if nothing tells them.

    Source: "The /proc filesystem" of the README of NVIDIA's driver.
    """
    found = []
    for path in sorted(facts.glob("*/information")):
        with contextlib.suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key == "Model":
                    found.append(value.strip())
    return tuple(found)


def has_gpu(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> bool:
    """True if a GPU's device node is there and the environment doesn't hide all GPUs."""
    # CUDA C++ Programming Guide, "CUDA Environment Variables": devices after an invalid
    # index are invisible, so an empty value or -1 hides all.
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any((devices / node).exists() for node in _DEVICE_NODES)
