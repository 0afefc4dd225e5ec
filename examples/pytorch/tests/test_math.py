"""Tensor operations, compared with the same operation on the CPU."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

DEVICE = "cuda"


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.float64, 1e-10), (torch.float16, 5e-2), (torch.bfloat16, 0.5)],
    ids=["fp32", "fp64", "fp16", "bf16"],
)
def test_matmul(dtype: torch.dtype, tolerance: float) -> None:
    a = torch.randn(192, 256).to(dtype)
    b = torch.randn(256, 160).to(dtype)
    expected = a.double() @ b.double()
    found = (a.to(DEVICE) @ b.to(DEVICE)).cpu().double()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance / 10)


def test_batched_products() -> None:
    a, b, c = torch.randn(8, 33, 64), torch.randn(8, 64, 17), torch.randn(8, 33, 17)
    found = torch.baddbmm(c.to(DEVICE), a.to(DEVICE), b.to(DEVICE), beta=0.5)
    torch.testing.assert_close(found.cpu(), 0.5 * c + a @ b, atol=1e-4, rtol=1e-4)
    bilinear = torch.einsum("bij,bjk,bik->b", a.to(DEVICE), b.to(DEVICE), c.to(DEVICE))
    torch.testing.assert_close(bilinear.cpu(), ((a @ b) * c).sum((1, 2)), atol=1e-2, rtol=1e-3)


def test_elementwise() -> None:
    x = torch.linspace(-4, 4, 5001)
    on_gpu = x.to(DEVICE)
    for function in (torch.exp, torch.erf, torch.sin, torch.tanh, torch.sigmoid, torch.lgamma):
        torch.testing.assert_close(function(on_gpu).cpu(), function(x), atol=1e-4, rtol=1e-4)
    found = torch.where(on_gpu > 0, on_gpu.clamp(max=2).pow(1.5), -on_gpu.abs().sqrt())
    expected = torch.where(x > 0, x.clamp(max=2).pow(1.5), -x.abs().sqrt())
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_conversions() -> None:
    x = torch.randn(1000) * 50
    for dtype in (torch.int8, torch.int64, torch.bool, torch.bfloat16, torch.complex64):
        if dtype is torch.int8:
            x = x.clamp(-120, 120)
        assert torch.equal(x.to(DEVICE).to(dtype).cpu(), x.to(dtype))


def test_reductions() -> None:
    x = torch.randn(64, 1000)
    on_gpu = x.to(DEVICE)
    torch.testing.assert_close(on_gpu.sum().cpu(), x.sum(), atol=1e-2, rtol=1e-4)
    torch.testing.assert_close(on_gpu.var(1).cpu(), x.var(1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(on_gpu.logsumexp(0).cpu(), x.logsumexp(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(on_gpu.cumsum(1).cpu(), x.cumsum(1), atol=1e-3, rtol=1e-4)
    assert torch.equal(on_gpu.argmax(1).cpu(), x.argmax(1))
    assert torch.equal(on_gpu.median(1).values.cpu(), x.median(1).values)
    assert bool((on_gpu.amin(0) <= on_gpu.amax(0)).all())


def test_sorting() -> None:
    # Distinct values: otherwise the order of indices is free.
    x = torch.randperm(50_000).float()
    on_gpu = x.to(DEVICE)
    values, places = on_gpu.sort()
    assert torch.equal(values.cpu(), torch.arange(50_000).float())
    assert torch.equal(x[places.cpu()], values.cpu())
    assert on_gpu.topk(5).values.tolist() == [49_999, 49_998, 49_997, 49_996, 49_995]
    assert on_gpu.kthvalue(10).values.item() == 9
    borders = torch.tensor([0.5, 99.0, 1e6], device=DEVICE)
    assert torch.searchsorted(values, borders).tolist() == [1, 99, 50_000]


def test_unique_and_counts() -> None:
    x = torch.randint(0, 97, (20_000,))
    for found, expected in zip(
        torch.unique(x.to(DEVICE), return_inverse=True, return_counts=True),
        torch.unique(x, return_inverse=True, return_counts=True),
        strict=True,
    ):
        assert torch.equal(found.cpu(), expected)
    assert torch.equal(torch.bincount(x.to(DEVICE)).cpu(), torch.bincount(x))


def test_indexing() -> None:
    x = torch.randn(300, 40)
    rows = torch.randint(0, 300, (500,))
    on_gpu, gpu_rows = x.to(DEVICE), rows.to(DEVICE)
    assert torch.equal(on_gpu[gpu_rows].cpu(), x[rows])
    assert torch.equal(on_gpu[on_gpu > 1].cpu(), x[x > 1])
    assert torch.equal(on_gpu.gather(0, gpu_rows[:, None].expand(-1, 40)).cpu(), x[rows])
    assert torch.equal(torch.nonzero(on_gpu > 2).cpu(), torch.nonzero(x > 2))
    assert torch.equal(on_gpu.flip(1).roll(3, 0).cpu(), x.flip(1).roll(3, 0))


def test_scatter() -> None:
    # Whole numbers: atomic additions give the same sum in any order.
    values = torch.randint(-9, 9, (500, 40)).float()
    rows = torch.randint(0, 30, (500,))
    expected = torch.zeros(30, 40).index_add(0, rows, values)
    zeros = torch.zeros(30, 40, device=DEVICE)
    found = zeros.index_add(0, rows.to(DEVICE), values.to(DEVICE))
    assert torch.equal(found.cpu(), expected)
    places = rows[:, None].expand(-1, 40).to(DEVICE)
    assert torch.equal(zeros.scatter_add(0, places, values.to(DEVICE)).cpu(), expected)
    largest = zeros.scatter_reduce(0, places, values.to(DEVICE), "amax", include_self=False)
    assert largest.max().item() == values.max().item()


def test_fft() -> None:
    x = torch.randn(4, 96, 60)
    found = torch.fft.rfft2(x.to(DEVICE))
    torch.testing.assert_close(found.cpu(), torch.fft.rfft2(x), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(torch.fft.irfft2(found, s=(96, 60)).cpu(), x, atol=1e-5, rtol=1e-4)
    signal = torch.randn(1 << 14, dtype=torch.float64)
    spectrum = torch.fft.fft(signal.to(DEVICE))
    torch.testing.assert_close(spectrum.abs().square().mean().cpu(), signal.square().sum())


@pytest.mark.parametrize("solver", ["svd", "qr", "eigh", "cholesky"])
def test_decomposition_gives_the_matrix_back(solver: str) -> None:
    a = torch.randn(70, 70, dtype=torch.float64, device=DEVICE)
    if solver in ("eigh", "cholesky"):
        a = a @ a.mT + 70 * torch.eye(70, dtype=torch.float64, device=DEVICE)
    if solver == "svd":
        u, s, vh = torch.linalg.svd(a)
        found = u * s @ vh
    elif solver == "qr":
        q, r = torch.linalg.qr(a)
        torch.testing.assert_close(q.mT @ q, torch.eye(70, dtype=torch.float64, device=DEVICE))
        found = q @ r
    elif solver == "eigh":
        values, vectors = torch.linalg.eigh(a)
        found = vectors * values @ vectors.mT
    else:
        lower = torch.linalg.cholesky(a)
        found = lower @ lower.mT
    torch.testing.assert_close(found, a, atol=1e-9, rtol=1e-9)


def test_linear_systems() -> None:
    a = torch.randn(12, 40, 40, dtype=torch.float64) + 10 * torch.eye(40, dtype=torch.float64)
    b = torch.randn(12, 40, 3, dtype=torch.float64)
    found = torch.linalg.solve(a.to(DEVICE), b.to(DEVICE))
    torch.testing.assert_close(found.cpu(), torch.linalg.solve(a, b))
    signs, logs = torch.linalg.slogdet(a.to(DEVICE))
    torch.testing.assert_close((signs.cpu(), logs.cpu()), tuple(torch.linalg.slogdet(a)))
    torch.testing.assert_close(torch.linalg.inv(a.to(DEVICE)).cpu(), torch.linalg.inv(a))


def test_sparse_product() -> None:
    dense = torch.randn(200, 150) * (torch.rand(200, 150) < 0.05)
    b = torch.randn(150, 30)
    on_gpu = dense.to(DEVICE)
    for sparse in (on_gpu.to_sparse_csr(), on_gpu.to_sparse_coo()):
        assert torch.equal(sparse.to_dense().cpu(), dense)
        torch.testing.assert_close((sparse @ b.to(DEVICE)).cpu(), dense @ b, atol=1e-4, rtol=1e-4)


def test_random_numbers() -> None:
    generator = torch.Generator(DEVICE)
    first = torch.randn(200_000, device=DEVICE, generator=generator.manual_seed(5))
    again = torch.randn(200_000, device=DEVICE, generator=generator.manual_seed(5))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.randn(200_000, device=DEVICE, generator=generator))
    assert abs(first.mean().item()) < 0.02
    assert abs(first.std().item() - 1) < 0.02
    assert torch.equal(torch.randperm(999, device=DEVICE).sort().values.cpu(), torch.arange(999))
    drawn = torch.multinomial(torch.tensor([0.0, 1.0, 3.0], device=DEVICE), 8000, replacement=True)
    shares = torch.bincount(drawn, minlength=3).cpu() / 8000
    torch.testing.assert_close(shares, torch.tensor([0.0, 0.25, 0.75]), atol=0.03, rtol=0)


def test_arange_and_linspace_integrate() -> None:
    x = torch.linspace(0, math.pi, 2001, dtype=torch.float64, device=DEVICE)
    assert torch.trapezoid(torch.sin(x), x).item() == pytest.approx(2, abs=1e-5)
    evens = torch.arange(0, 1000, 2, device=DEVICE)
    assert evens.sum().item() == 249_500
