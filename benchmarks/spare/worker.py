"""A process that works with PyTorch, for long_run.py.

``steps`` reads numbers from standard input, and answers each with microseconds per training step,
of the clock and of CPU time. So two processes can take turns. ``soak`` works once with eight
threads, two forked children and DataLoader workers, and prints sums.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from typing import Any

THREADS = 8


def steps(torch: Any, device: str) -> None:
    """Small operations: what costs is the CPU's code that starts them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 8)
    ).to(device)
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    data = torch.rand(16, 32).to(device)
    for line in sys.stdin:
        count = int(line)
        begin, spent = time.perf_counter(), time.process_time()
        for _ in range(count):
            optimizer.zero_grad()
            net(data).square().mean().backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times = time.perf_counter() - begin, time.process_time() - spent
        print(*(seconds / count * 1e6 for seconds in times), flush=True)


def work(torch: Any, device: str, number: int, sums: dict[str, float]) -> None:
    """What one thread does."""
    nn = torch.nn
    a = torch.linspace(0, 1 + number, 64 * 64).reshape(64, 64).to(device)
    image = torch.linspace(0, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).to(device)
    weight = torch.linspace(-1, 1, 8 * 3 * 9).reshape(8, 3, 3, 3).to(device)
    operations = {
        "elementwise": lambda: torch.tanh(a) + a.sort().values,
        "matmul": lambda: a @ a,
        "conv": lambda: nn.functional.conv2d(image, weight),
        "fft": lambda: torch.fft.fft2(a).abs(),
        "svd": lambda: torch.linalg.svdvals(a),
        "sparse": lambda: torch.sparse.mm(a.to_sparse(), a),
        "error": lambda: torch.tensor(0.0 if raises(lambda: a @ a[:3]) else 1.0),
    }
    # Each thread begins with another operation: they miss different pages at once.
    names = sorted(operations)
    for name in names[number % len(names) :] + names[: number % len(names)]:
        sums[f"{number} {name}"] = float(operations[name]().double().abs().sum())


def raises(operation: Any) -> bool:
    try:
        operation()
    except RuntimeError:
        return True
    return False


def soak(torch: Any, device: str) -> None:
    sums: dict[str, float] = {}
    children = []
    if device == "cpu" or not torch.cuda.is_initialized():
        for number in range(2):
            child = os.fork()
            if child == 0:
                own: dict[str, float] = {}
                work(torch, "cpu", number, own)
                os._exit(len(own) != 7)
            children.append(child)
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)
    sums["loader"] = sum(float(batch[0].sum()) for batch in loader)
    threads = [
        threading.Thread(target=work, args=(torch, device, number, sums))
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sums["children"] = float(sum(os.waitpid(child, 0)[1] for child in children))
    print(json.dumps(sums, sort_keys=True))


if __name__ == "__main__":
    TORCH = importlib.import_module("torch")
    # Threads of processes that take turns wait by spinning, and disturb each other.
    TORCH.set_num_threads(1 if sys.argv[1] == "steps" else 2)
    DEVICE = "cuda" if TORCH.cuda.is_available() else "cpu"
    {"steps": steps, "soak": soak}[sys.argv[1]](TORCH, DEVICE)
