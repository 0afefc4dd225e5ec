"""The workloads, and what each needs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent / "workloads"


@dataclass(frozen=True)
class Workload:
    """A script and its mode, beside the workload of the paper that it is like.

    ``quick`` and ``full`` are numbers of steps, batches or tokens.

    ``needs`` are alternatives within a tuple: one importable module of each tuple must be there.
    """

    name: str
    paper: str
    script: str
    mode: str
    needs: tuple[tuple[str, ...], ...]
    quick: int
    full: int

    @property
    def path(self) -> Path:
        return _FOLDER / self.script

    def missing(self) -> str | None:
        """What isn't installed, or None."""
        for modules in self.needs:
            if not any(importlib.util.find_spec(module) for module in modules):
                return f"{' or '.join(modules)} is not installed"
        return None


_TORCH = (("torch",),)
_LLAMA = (("torch",), ("transformers",))
# Without one of the plugins JAX runs on the CPU alone.
_JAX = (("jax",), ("jax_cuda13_plugin", "jax_cuda12_plugin"))

WORKLOADS = (
    Workload(
        "mobilenetv2-train", "MobileNetV2 PyTorch Train", "mobilenetv2.py", "train", _TORCH, 5, 50
    ),
    Workload(
        "mobilenetv2-inference",
        "MobileNetV2 PyTorch Inference",
        "mobilenetv2.py",
        "inference",
        _TORCH,
        5,
        100,
    ),
    Workload(
        "transformer-train", "Transformer PyTorch Train", "transformer.py", "train", _TORCH, 5, 100
    ),
    Workload(
        "transformer-inference",
        "Transformer PyTorch Inference",
        "transformer.py",
        "inference",
        _TORCH,
        16,
        120,
    ),
    Workload(
        "llama-inference", "Llama2 Transformers Inference", "llama.py", "inference", _LLAMA, 16, 128
    ),
    Workload("jax-train", "MobileNetV2 TensorFlow Train", "jax_conv.py", "train", _JAX, 5, 100),
    Workload(
        "jax-inference",
        "MobileNetV2 TensorFlow Inference",
        "jax_conv.py",
        "inference",
        _JAX,
        5,
        100,
    ),
)
