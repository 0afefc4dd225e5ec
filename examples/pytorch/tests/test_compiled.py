"""Kernels made at run time: torch.compile and Triton. They lie in no library."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

DEVICE = "cuda"
pytestmark = pytest.mark.slow


def test_compiled_function() -> None:
    pytest.importorskip("triton")

    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.sin(x) * y + x.square()).softmax(-1).sum(0)

    x, y = torch.randn(128, 256, device=DEVICE), torch.randn(128, 256, device=DEVICE)
    found = torch.compile(chain)(x, y)
    torch.testing.assert_close(found, chain(x, y), atol=1e-4, rtol=1e-4)


def test_compiled_training_step() -> None:
    pytest.importorskip("triton")
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
    ).to(DEVICE)
    x = torch.randn(40, 32, device=DEVICE)
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model)(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-3)
