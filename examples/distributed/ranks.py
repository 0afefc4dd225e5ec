"""Runs a function in one process for each GPU, and returns what each rank returned."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Without GPUs, ranks talk through gloo: to try a change of the suite.
WORLD = torch.cuda.device_count() if torch.cuda.is_available() else 2


def device_of(rank: int) -> torch.device:
    """The device of a rank."""
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def _begin(
    rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
    )
    try:
        torch.save(function(rank, device, *arguments), Path(folder, f"rank{rank}"))
    finally:
        dist.destroy_process_group()


def on_all_gpus(folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(rank, device, *arguments)`` returned, by rank.

    Args:
        folder: an empty folder, in which the ranks meet.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.multiprocessing.spawn(
        _begin, args=(WORLD, str(folder), function, arguments), nprocs=WORLD, join=True
    )
    return [torch.load(folder / f"rank{rank}", weights_only=True) for rank in range(WORLD)]
