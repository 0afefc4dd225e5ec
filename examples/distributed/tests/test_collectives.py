"""Each collective operation of NCCL that PyTorch offers, over all GPUs of this host."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import WORLD, on_all_gpus  # noqa: E402

RANKS = range(WORLD)


def collect(rank, device):
    own = torch.full((1000,), float(rank + 1), device=device)
    summed = own.clone()
    dist.all_reduce(summed)
    largest = own.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    halves = own.half()
    dist.all_reduce(halves)
    gathered = [torch.empty_like(own) for _ in RANKS]
    dist.all_gather(gathered, own)
    first = own.clone()
    dist.broadcast(first, src=0)
    passed = torch.empty_like(own)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own, (rank + 1) % WORLD),
            dist.P2POp(dist.irecv, passed, (rank - 1) % WORLD),
        ]
    )
    for request in requests:
        request.wait()
    dist.barrier()
    return [
        part.float().mean().item()
        for part in (summed, largest, halves, torch.cat(gathered), first, passed)
    ]


def test_collectives(tmp_path: Path):
    total = sum(rank + 1 for rank in RANKS)
    for rank, found in enumerate(on_all_gpus(tmp_path, collect)):
        expected = [total, WORLD, total, total / WORLD, 1, (rank - 1) % WORLD + 1]
        assert found == pytest.approx(expected)


def train(rank, device):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    parallel = torch.nn.parallel.DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    torch.manual_seed(rank)
    for _ in range(5):
        x = torch.randn(16, 32).to(device)
        optimizer.zero_grad()
        (parallel(x).squeeze(1) - x.sum(dim=1)).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def test_all_ranks_train_the_same_model(tmp_path: Path):
    first, *others = on_all_gpus(tmp_path, train)
    for other in others:
        for one, another in zip(first, other, strict=True):
            torch.testing.assert_close(one, another)
