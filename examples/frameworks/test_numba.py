"""numba-cuda: Python functions compiled to kernels at run time."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")
cuda = pytest.importorskip("numba.cuda")
np = pytest.importorskip("numpy")


@cuda.jit
def saxpy(factor, x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = factor * x[i] + y[i]


@cuda.jit
def count_letters(text, counts):
    i = cuda.grid(1)
    if i < text.size:
        cuda.atomic.add(counts, text[i], 1)


@cuda.jit
def reverse_block(values):
    shared = cuda.shared.array(64, "int32")
    i = cuda.threadIdx.x
    shared[i] = values[i]
    cuda.syncthreads()
    values[i] = shared[63 - i]


@pytest.fixture(autouse=True, scope="module")
def numba_that_fits_numpy() -> None:
    """numba-cuda up to 0.30.4 asks NumPy for ``row_stack``, which NumPy 2.5 hasn't any more."""
    try:
        reverse_block[1, 64](cuda.to_device(np.zeros(64, dtype=np.int32)))
    except AttributeError as e:
        if "row_stack" not in str(e):
            raise
        pytest.skip(f"this numba-cuda needs an older NumPy: {e}")


def test_saxpy() -> None:
    x = np.arange(1000, dtype=np.float32)
    y = np.ones(1000, dtype=np.float32)
    out = cuda.device_array_like(x)
    saxpy[8, 128](np.float32(0.5), cuda.to_device(x), cuda.to_device(y), out)
    np.testing.assert_array_equal(out.copy_to_host(), 0.5 * x + 1)


def test_atomic_counts() -> None:
    text = np.frombuffer(b"negativa" * 100, dtype=np.uint8)
    counts = cuda.to_device(np.zeros(256, dtype=np.int32))
    count_letters[7, 128](cuda.to_device(text), counts)
    found = counts.copy_to_host()
    for letter in "negativ":
        assert found[ord(letter)] == 100 * "negativa".count(letter)
    assert found.sum() == 800


def test_shared_memory() -> None:
    values = cuda.to_device(np.arange(64, dtype=np.int32))
    reverse_block[1, 64](values)
    assert values.copy_to_host().tolist() == list(range(63, -1, -1))
