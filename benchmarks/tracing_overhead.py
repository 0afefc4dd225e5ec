"""What tracing costs: the same work with and without ``--negativa``, in turn, N pairs.

Three measures, on a GPU with PyTorch:

- start: from the start of pytest to its first test, for a suite that only initializes CUDA;
- loop: a training loop of a tiny model, bound by kernel launches, timed inside of its test;
- suite: 500 GPU tests of about a millisecond each, from the start of pytest to its end.

Run: python benchmarks/tracing_overhead.py [--pairs 10] [--only loop]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_LOOP = """
import time
import torch

def test_loop(capsys):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 16, device="cuda")

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(50):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(600):
        step()
    torch.cuda.synchronize()
    with capsys.disabled():
        print(f"LOOP {time.perf_counter() - start:.6f}")
"""

_START = """
import os
import time
import torch

def test_start(capsys):
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with capsys.disabled():
        print(f"START {time.time() - float(os.environ['BENCHMARK_START']):.6f}")
"""

_SUITE = """
import pytest
import torch

@pytest.fixture(scope="session")
def x():
    return torch.randn(64, 64, device="cuda")

@pytest.mark.parametrize("n", range(500))
def test_op(x, n):
    y = (x * n).relu().sum(dim=n % 2)
    assert y.shape == (64,)
    assert bool(torch.isfinite(y).all())
"""


def _run(folder: Path, name: str, traced: bool) -> tuple[str, float]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    if traced:
        command.append("--negativa")
    start = time.time()
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "BENCHMARK_START": str(start)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout, time.time() - start


def _measure(folder: Path, name: str, traced: bool) -> float:
    output, wall = _run(folder, name, traced)
    if match := re.search(r"(?:LOOP|START) ([\d.]+)", output):
        return float(match[1])
    # pytest's own time: the report that follows is another matter, timed by report_time.py.
    match = re.search(r"passed in ([\d.]+)s", output)
    return float(match[1]) if match else wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="runs of each kind (default: 10)")
    parser.add_argument("--only", choices=("start", "loop", "suite"), help="one measure")
    arguments = parser.parse_args()
    pairs = arguments.pairs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (
            ("test_start.py", _START),
            ("test_loop.py", _LOOP),
            ("test_suite.py", _SUITE),
        ):
            if arguments.only not in (None, file[5:-3]):
                continue
            (folder / file).write_text(text)
            for traced in (False, True):
                _measure(folder, file, traced)
            plain, traced_times = [], []
            for _ in range(pairs):
                plain.append(_measure(folder, file, traced=False))
                traced_times.append(_measure(folder, file, traced=True))
            ratios = [t / p for t, p in zip(traced_times, plain, strict=True)]
            print(
                f"{file[5:-3]:6} without {statistics.median(plain):.3f} s, "
                f"with {statistics.median(traced_times):.3f} s, "
                f"difference {statistics.median(traced_times) - statistics.median(plain):+.3f} s, "
                f"ratio median {statistics.median(ratios):.3f} "
                f"(min {min(ratios):.3f}, max {max(ratios):.3f}), {pairs} pairs"
            )


if __name__ == "__main__":
    main()
