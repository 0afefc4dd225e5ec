"""``traced.py FOLDER DETECTOR SCENE``: trace this process while a scene plays.

DETECTOR is ``native``, or a level of the detector in Python.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_negativa.models.settings import TraceLevel
from pytest_negativa.models.trace import Context, Phase, Role
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.detector import TracerBusy
from pytest_negativa.tracing.start import Tracing, start_tracing, trace_by
from tests.support.native_detector import NativeDetector


def load(module: str) -> Any:
    """Import late, after tracing has started; type checkers need not have it."""
    return importlib.import_module(module)


def sine(queue: Any = None) -> None:
    torch = load("torch")

    value = torch.ones(8, device="cuda").sin().sum().item()
    if queue is not None:
        queue.put(value)


def operations(tracing: Tracing) -> None:
    torch = load("torch")

    a = torch.randn(64, 64, device="cuda")
    scenes: dict[str, Callable[[], Any]] = {
        "sin": a.sin,
        "matmul": lambda: a @ a,
        "fft": lambda: torch.fft.fft(a),
        "sort": a.flatten().sort,
        "svd": lambda: torch.linalg.svd(a),
    }
    for name, scene in scenes.items():
        tracing.detector.set_context(Context(phase=Phase.CALL, nodeid=name))
        scene()
        torch.cuda.synchronize()
        tracing.drain()


def fork(tracing: Tracing) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=sine, args=(queue,))
    process.start()
    queue.get(timeout=100)
    process.join()


def profiler_in_pause(tracing: Tracing) -> None:
    torch, profiler = load("torch"), load("torch.profiler")

    sine()
    for _ in range(2):
        tracing.detector.pause("a test that profiles")
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
            torch.ones(8, device="cuda").cos()
            torch.cuda.synchronize()
        sys.stdout.write(f"events {len(found.events())}\n")
        tracing.detector.resume()
        torch.ones(8, device="cuda").cosh()


def profiler_without_pause(tracing: Tracing) -> None:
    torch, profiler = load("torch"), load("torch.profiler")

    for name in ("cos", "sin"):
        tracing.detector.set_context(Context(phase=Phase.CALL, nodeid=name))
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
            getattr(torch.ones(8, device="cuda"), name)()
            torch.cuda.synchronize()
        sys.stdout.write(f"events {len(found.events())}\n")
        torch.ones(8, device="cuda").cosh()


def ranges(tracing: Tracing) -> None:
    torch = load("torch")

    a = torch.randn(64, 64, device="cuda", requires_grad=True)
    x = a.detach()
    x.sin()
    torch.cuda.nvtx.range_push("outer")
    x.cos()
    torch.cuda.nvtx.range_push("inner")
    for _ in range(3):
        x.tanh()
    torch.cuda.nvtx.range_pop()
    x.cos()
    torch.cuda.nvtx.range_pop()
    with torch.autograd.profiler.emit_nvtx():
        (a @ a).sum().backward()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x.exp()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    tracing.detector.set_context(Context(phase=Phase.CALL, nodeid="graph"))
    with torch.cuda.graph(graph):
        x.exp()
    torch.cuda.nvtx.range_push("replay")
    graph.replay()
    graph.replay()
    torch.cuda.nvtx.range_pop()


def killed(tracing: Tracing) -> None:
    sine()
    os.kill(os.getpid(), 9)


def main() -> None:
    folder, detector, scene = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    run = Run(folder / "run-1")

    def start() -> Tracing:
        if detector == "native":
            native = NativeDetector(run.trace_dir, run.run_id, role=Role.SOLO)
            return trace_by(native, run, Role.SOLO, root=folder)
        return start_tracing(run, Role.SOLO, root=folder, level=TraceLevel(detector))

    if scene == "busy":
        from cupti import cupti

        cupti.subscribe(lambda *_: None, None)
        try:
            start()
        except TracerBusy as e:
            sys.stdout.write(f"busy {e}\n")
        return
    tracing = start()
    SCENES[scene](tracing)
    tracing.stop()


SCENES = {
    "operations": operations,
    "fork": fork,
    "profiler-in-pause": profiler_in_pause,
    "profiler-without-pause": profiler_without_pause,
    "killed": killed,
    "ranges": ranges,
}

if __name__ == "__main__":
    main()
