"""JAX: kernels that XLA compiles, beside cuBLAS, cuDNN, cuFFT and cuSOLVER."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
np = pytest.importorskip("numpy")
jnp = jax.numpy


@pytest.fixture(autouse=True)
def on_the_gpu() -> None:
    try:
        jax.devices("gpu")
    except RuntimeError as e:
        pytest.skip(f"JAX has no GPU: {e}")


def test_compiled_product() -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 128, 128)).astype("float32")

    @jax.jit
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, precision="highest").clip(-10, 10)

    np.testing.assert_allclose(product(a, b), (a @ b).clip(-10, 10), atol=1e-3)


def test_gradient() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x * w).sum()

    w, x = np.random.default_rng(2).standard_normal((2, 1000)).astype("float32")
    found = jax.jit(jax.grad(loss))(w, x)
    np.testing.assert_allclose(found, x * (1 - np.tanh(x * w) ** 2), atol=1e-4)


def test_convolution() -> None:
    picture = np.random.default_rng(3).standard_normal((1, 1, 20, 20)).astype("float32")
    box = np.full((1, 1, 3, 3), 1 / 9, dtype="float32")
    found = jax.lax.conv(picture, box, (1, 1), "VALID", precision="highest")
    windows = np.lib.stride_tricks.sliding_window_view(picture[0, 0], (3, 3))
    np.testing.assert_allclose(found[0, 0], windows.mean((2, 3)), atol=1e-4)


def test_fft_and_decomposition() -> None:
    signal = np.random.default_rng(4).standard_normal(2048).astype("float32")
    np.testing.assert_allclose(jnp.fft.rfft(signal), np.fft.rfft(signal), atol=1e-2)
    a = np.random.default_rng(5).standard_normal((40, 40)).astype("float32")
    u, s, vh = jnp.linalg.svd(a)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose((u * s) @ vh, a, atol=1e-3)


def test_random_numbers_are_repeatable() -> None:
    first, again = (jax.random.normal(jax.random.key(7), (10_000,)) for _ in range(2))
    assert bool((first == again).all())
    assert abs(float(first.mean())) < 0.05
