"""Streams, graphs, memory and processes: what is between Python and the kernels."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

torch = pytest.importorskip("torch")

DEVICE = "cuda"

CHILD = """
import torch
x = torch.arange(1000, device="cuda", dtype=torch.float64)
print(int(torch.cumprod(1 + x / 1e6, 0)[-1].item() * 1e6))
"""


def determinant_in_another_process(size: int) -> float:
    return float(torch.linalg.det(3 * torch.eye(size, device="cuda")).item())


def test_streams_and_events() -> None:
    source = torch.randn(1 << 20, device=DEVICE)
    streams = [torch.cuda.Stream() for _ in range(3)]
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    results = []
    for power, stream in enumerate(streams, 2):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(source.pow(power).sum())
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    ended.record()
    ended.synchronize()
    assert started.elapsed_time(ended) > 0
    for power, result in enumerate(results, 2):
        expected = source.double().pow(power).sum().item()
        assert result.item() == pytest.approx(expected, rel=1e-3, abs=50)


def test_cuda_graph_replays_with_new_input() -> None:
    weight = torch.randn(64, 64, device=DEVICE)
    x = torch.zeros(16, 64, device=DEVICE)

    def work() -> torch.Tensor:
        return torch.relu(x @ weight).softmax(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    for _ in range(3):
        x.copy_(torch.randn(16, 64))
        graph.replay()
        torch.testing.assert_close(out, work())


def test_pinned_memory_copies() -> None:
    pinned = torch.randn(1 << 18).pin_memory()
    assert pinned.is_pinned()
    there = pinned.to(DEVICE, non_blocking=True)
    back = torch.empty_like(pinned, pin_memory=True)
    back.copy_(there * 2, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, pinned * 2)


def test_strided_copies_and_concatenation() -> None:
    x = torch.randn(40, 50, 6)
    on_gpu = x.to(DEVICE)
    assert torch.equal(on_gpu.permute(2, 0, 1).contiguous().cpu(), x.permute(2, 0, 1))
    parts = on_gpu.split(7, dim=1)
    assert torch.equal(torch.cat(parts, 1), on_gpu)
    assert torch.equal(torch.stack(parts[:3]).cpu(), torch.stack(x.split(7, dim=1)[:3]))
    assert torch.equal(on_gpu.repeat(2, 1, 1)[40:], on_gpu)


def test_memory_is_given_back() -> None:
    gc.collect()  # What other tests left must not go in between.
    before = torch.cuda.memory_allocated()
    block = torch.full((1 << 22,), 7, dtype=torch.uint8, device=DEVICE)
    assert torch.cuda.memory_allocated() - before == 1 << 22
    assert block.sum().item() == 7 << 22
    del block
    assert torch.cuda.memory_allocated() == before


def test_child_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    expected = torch.cumprod(1 + torch.arange(1000, dtype=torch.float64) / 1e6, 0)[-1].item() * 1e6
    assert int(done.stdout) == pytest.approx(expected, abs=1)


def test_spawned_worker() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        assert pool.submit(determinant_in_another_process, 4).result(300) == pytest.approx(81)
