"""A Llama that is split over all GPUs gives what the whole one gives on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from llama import generate, make_llama, split  # noqa: E402
from ranks import device_of, on_all_gpus  # noqa: E402


def generate_split(rank, device):
    return generate(split(make_llama(device), device), device)


def test_tensor_parallel_inference(tmp_path: Path):
    device = device_of(0)
    expected = generate(make_llama(device), device)
    for found in on_all_gpus(tmp_path, generate_split):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
