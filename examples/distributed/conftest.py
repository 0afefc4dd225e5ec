"""Skips the suite on machines with fewer than two GPUs."""

from __future__ import annotations

import importlib.util
import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch") is None:
        return  # Each module skips itself, with this reason.
    import torch

    if torch.cuda.device_count() < 2 and "WITHOUT_GPUS" not in os.environ:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="fewer than two GPUs"))
