"""Passes of a few operations of PyTorch, CuPy or JAX, for stack.py.

Argument: the module. Prints seconds of the first pass, and medians of the later ones by the clock
and of CPU time. On the GPU if there is one; CuPy needs it.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

PASSES = 30


def torch_pass(torch: Any) -> Callable[[], None]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(7200, 8)
    )

    def run() -> None:
        images = torch.rand(4, 3, 32, 32, device=device)
        net.to(device)(images).square().mean().backward()
        matrix = torch.rand(64, 64, device=device)
        float((torch.fft.fft2(matrix @ matrix).abs().sort().values + torch.tanh(matrix)).sum())

    return run


def cupy_pass(cupy: Any) -> Callable[[], None]:
    def run() -> None:
        matrix = cupy.random.rand(64, 64)
        float((cupy.sort(cupy.abs(cupy.fft.fft2(matrix @ matrix))) + cupy.tanh(matrix)).sum())

    return run


def jax_pass(jax: Any) -> Callable[[], None]:
    np = importlib.import_module("jax.numpy")

    def step(matrix: Any) -> Any:
        return (np.sort(np.abs(np.fft.fft2(matrix @ matrix))) + np.tanh(matrix)).sum()

    compiled = jax.jit(step)

    def run() -> None:
        float(compiled(jax.random.uniform(jax.random.key(0), (64, 64))))

    return run


def main() -> None:
    name = sys.argv[1]
    begin = time.perf_counter()
    run = {"torch": torch_pass, "cupy": cupy_pass, "jax": jax_pass}[name](
        importlib.import_module(name)
    )
    begin = time.perf_counter()
    run()
    first = time.perf_counter() - begin
    rows = []
    for _ in range(PASSES):
        begin, spent = time.perf_counter(), time.process_time()
        run()
        rows.append((time.perf_counter() - begin, time.process_time() - spent))
    print(first, *map(statistics.median, zip(*rows, strict=True)))


if __name__ == "__main__":
    main()
