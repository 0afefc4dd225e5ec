"""Which real libraries the tests install from the package index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

# Of CUDA 9.1: xgboost, the smallest wheel of such an old toolkit.
PINNED = {
    "nvidia-cublas": "13.1.0.3",
    "nvidia-cufft": "12.0.0.61",
    "nvidia-curand": "10.4.0.35",
    "nvidia-nccl-cu13": "2.28.9",
    "nvidia-cuda-cuobjdump": "13.5.37",
    "numpy": "2.2.6",
    "pyarrow": "21.0.0",
    "xgboost": "0.72.1",
}


NEWEST = {"nvidia-cublas": "13.10.0.20", "nvidia-curand": "10.4.5.25"}
"""Libraries change: these are the newest wheels."""

Install = Callable[[dict[str, str]], Path]
"""Installs packages; the folder that has them."""
