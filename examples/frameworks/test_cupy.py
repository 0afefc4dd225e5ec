"""CuPy: NVIDIA's libraries, CuPy's own compiled kernels, and kernels made at run time."""

from __future__ import annotations

import pytest

cp = pytest.importorskip("cupy")
np = pytest.importorskip("numpy")


def test_matrix_product() -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 90, 90))
    np.testing.assert_allclose(cp.asnumpy(cp.asarray(a) @ cp.asarray(b)), a @ b, atol=1e-10)


def test_sort_and_sum() -> None:
    values = np.random.default_rng(2).permutation(30_000)
    there = cp.asarray(values)
    assert cp.sort(there).tolist() == list(range(30_000))
    assert int(there.sum()) == 30_000 * 29_999 // 2
    assert int(cp.argmax(there)) == int(np.argmax(values))


def test_fft() -> None:
    signal = np.random.default_rng(3).standard_normal(4096)
    found = cp.asnumpy(cp.fft.rfft(cp.asarray(signal)))
    np.testing.assert_allclose(found, np.fft.rfft(signal), atol=1e-9)


def test_linear_system() -> None:
    a = np.random.default_rng(4).standard_normal((50, 50)) + 20 * np.eye(50)
    found = cp.linalg.solve(cp.asarray(a), cp.ones(50))
    np.testing.assert_allclose(a @ cp.asnumpy(found), np.ones(50), atol=1e-10)


def test_kernel_from_source() -> None:
    source = r"""
    extern "C" __global__ void collatz_steps(const long long* start, int* steps, int count) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= count) return;
        int n = 0;
        for (long long x = start[i]; x != 1; ++n) x = x % 2 ? 3 * x + 1 : x / 2;
        steps[i] = n;
    }
    """
    starts = cp.asarray([1, 6, 7, 27, 97], dtype=cp.int64)
    steps = cp.zeros(5, dtype=cp.int32)
    cp.RawKernel(source, "collatz_steps")((1,), (32,), (starts, steps, 5))
    assert steps.tolist() == [0, 8, 16, 111, 118]
