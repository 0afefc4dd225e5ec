"""One pass of operations of many libraries; prints lines of JSON. Run by driver_reads.py.

Arguments: ``more`` adds a collective operation and torch.compile.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIGNAL_BIT = 1 << (signal.SIGSEGV - 1)


def kernel_handler() -> int:
    """Address of the handler of SIGSEGV, as the kernel has it: rt_sigaction is call 13."""
    raw = ctypes.create_string_buffer(32)
    ctypes.CDLL(None).syscall(13, int(signal.SIGSEGV), None, raw, 8)
    return int(struct.unpack_from("<Q", raw.raw)[0])


def owner_of(address: int) -> str:
    """The file mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return Path(line.split(maxsplit=5)[-1]).name
    return "no file"


def blocking_threads() -> list[str]:
    """Names of this process's threads that block SIGSEGV."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        status = dict(
            line.split(":\t", 1)
            for line in (task / "status").read_text().splitlines()
            if ":\t" in line
        )
        if int(status["SigBlk"], 16) & SIGNAL_BIT:
            found.append(status["Name"])
    return found


def main() -> None:
    begin = time.perf_counter()
    torch = importlib.import_module("torch")
    nn = torch.nn
    imported = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    results: dict[str, float | str] = {}
    times: dict[str, float] = {}

    def record(name: str, operation: Callable[[], Any]) -> None:
        started = time.perf_counter()
        try:
            value = operation()
            results[name] = float(value.double().abs().sum())
        except Exception as e:
            results[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:90]}"
        times[name] = round(time.perf_counter() - started, 3)

    a = torch.rand(64, 64, device="cpu").to(device)
    image = torch.rand(2, 3, 32, 32).to(device)
    record("elementwise", lambda: torch.tanh(a) + a.sort().values)
    record("cublas", lambda: a @ a)
    record("cublasLt", lambda: nn.functional.linear(a.half(), a.half(), a[0].half()).float())
    record("cudnn", lambda: nn.Conv2d(3, 8, 3, device=device)(image))
    record("cudnn training", lambda: train(nn, torch, device, image))
    record("cufft", lambda: torch.fft.fft2(a).abs())
    record("cusolver", lambda: torch.linalg.svdvals(a))
    record("cusparse", lambda: torch.sparse.mm(a.to_sparse(), a))
    record("curand", lambda: torch.rand(9, device=device) * 0)
    record(
        "attention", lambda: nn.TransformerEncoderLayer(64, 4, batch_first=True).to(device)(a[None])
    )
    record("lstm", lambda: nn.LSTM(64, 16).to(device)(a[None])[0])

    def tell() -> None:
        facts = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "results": results,
            "times": times,
            "import": round(imported - begin, 2),
            "all": round(time.perf_counter() - begin, 2),
            "maps": len(Path("/proc/self/maps").read_text().splitlines()),
            "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "blocking threads": sorted(blocking_threads()),
            "handler": owner_of(kernel_handler()),
        }
        print(json.dumps(facts), flush=True)

    # A line after each step: the last one counts, also of a pass that does not end.
    tell()
    if "more" in sys.argv:
        record("nccl", lambda: reduce(torch, device, a))
        tell()
        record("compile", lambda: torch.compile(lambda x: torch.tanh(x) * 3 + x)(a))
        tell()


def train(nn: Any, torch: Any, device: str, image: Any) -> Any:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 10)
    ).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(5):
        loss = net(image).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def reduce(torch: Any, device: str, a: Any) -> Any:
    dist = importlib.import_module("torch.distributed")
    backend = "nccl" if device == "cuda" else "gloo"
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    b = a.clone()
    dist.all_reduce(b)
    dist.destroy_process_group()
    return b


if __name__ == "__main__":
    main()
