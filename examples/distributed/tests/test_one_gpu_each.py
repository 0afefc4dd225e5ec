"""Workers of pytest-xdist take turns with the GPUs: worker 0 the first one, worker 1 the next."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from ranks import WORLD, device_of  # noqa: E402


@pytest.fixture
def device():
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return device_of(int(worker.removeprefix("gw")) % WORLD)


@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_product(device, size):
    torch.manual_seed(size)
    a = torch.rand(size, size)
    torch.testing.assert_close((a.to(device) @ a.to(device)).cpu(), a @ a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operation", ["sort", "cumsum", "softmax"])
def test_operation(device, operation):
    torch.manual_seed(1)
    a = torch.rand(50, 50)
    apply = {
        "sort": lambda x: x.sort(dim=0).values,
        "cumsum": lambda x: x.cumsum(dim=0),
        "softmax": lambda x: x.softmax(dim=0),
    }[operation]
    torch.testing.assert_close(apply(a.to(device)).cpu(), apply(a), rtol=1e-4, atol=1e-4)
