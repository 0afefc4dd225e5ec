"""Triton: kernels in Python, compiled at run time, on PyTorch's tensors."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def add_kernel(a, b, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    total = tl.load(a + places, mask=inside) + tl.load(b + places, mask=inside)
    tl.store(out + places, total, mask=inside)


@triton.jit
def product_kernel(a, b, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    places = rows * SIZE + columns
    tl.store(out + places, tl.dot(tl.load(a + places), tl.load(b + places)))


@triton.jit
def softmax_kernel(values, out, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    places = tl.program_id(0) * width + columns
    row = tl.load(values + places, mask=columns < width, other=-float("inf"))
    powers = tl.exp(row - tl.max(row, 0))
    tl.store(out + places, powers / tl.sum(powers, 0), mask=columns < width)


def test_add() -> None:
    a, b = torch.randn(2, 5000, device="cuda")
    out = torch.empty_like(a)
    add_kernel[(triton.cdiv(5000, 1024),)](a, b, out, 5000, BLOCK=1024)
    assert torch.equal(out, a + b)


def test_product() -> None:
    a, b = torch.randn(2, 64, 64, device="cuda", dtype=torch.float16)
    out = torch.empty(64, 64, device="cuda")
    product_kernel[(1,)](a, b, out, SIZE=64)
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-2, rtol=1e-2)


def test_softmax() -> None:
    values = torch.randn(30, 100, device="cuda")
    out = torch.empty_like(values)
    softmax_kernel[(30,)](values, out, 100, BLOCK=128)
    torch.testing.assert_close(out, values.softmax(1), atol=1e-6, rtol=1e-4)
