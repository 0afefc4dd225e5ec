"""Skips the suite where PyTorch sees no GPU, and seeds every test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch") is None:
        return  # Each module skips itself, with this reason.
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no GPU that PyTorch can use"))


@pytest.fixture(autouse=True)
def fixed_numbers() -> Iterator[None]:
    """Seeds, and float32 for what is float32: the tests compare with the CPU."""
    import torch

    torch.manual_seed(20_250_101)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    yield
    torch.cuda.synchronize()
