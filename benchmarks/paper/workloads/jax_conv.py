"""A small convolutional network in JAX on random images."""

from __future__ import annotations

import math
import os
from typing import Any

from workload import SEED, Arguments, finish, parse

_CLASSES = 10


def _prepare(arguments: Arguments) -> None:
    """What XLA reads when JAX is imported."""
    os.environ["JAX_PLATFORMS"] = arguments.device
    # Else three quarters of the GPU's memory are taken at the start, whatever is needed.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # Else kernels are chosen by timing them, and two runs need not choose the same.
    flags = os.environ.get("XLA_FLAGS", "")
    if "autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()


def _run(arguments: Arguments) -> list[float]:
    import jax  # type: ignore[import-not-found,unused-ignore]
    import jax.numpy as jnp  # type: ignore[import-not-found,unused-ignore]

    def initialize(key: Any) -> dict[str, Any]:
        shapes = {
            "conv1": (3, 3, 3, 32),
            "conv2": (3, 3, 32, 64),
            "dense1": (16 * 16 * 64, 256),
            "dense2": (256, _CLASSES),
        }
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(k, shape) * (2 / math.prod(shape[:-1])) ** 0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def forward(weights: dict[str, Any], images: Any) -> Any:
        x = images
        for name in ("conv1", "conv2"):
            x = jax.lax.conv_general_dilated(
                x, weights[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        x = jax.nn.relu(x.reshape(x.shape[0], -1) @ weights["dense1"])
        return jax.nn.log_softmax(x @ weights["dense2"])

    def loss_of(weights: dict[str, Any], images: Any, labels: Any) -> Any:
        scores = forward(weights, images)
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    @jax.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def step(weights: dict[str, Any], images: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, images, labels)
        return loss, jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients)

    weight_key, image_key, label_key = jax.random.split(jax.random.key(SEED), 3)
    weights = initialize(weight_key)
    images = jax.random.normal(image_key, (arguments.batch, 64, 64, 3))
    labels = jax.random.randint(label_key, (arguments.batch,), 0, _CLASSES)
    if arguments.training:
        losses = []
        for _ in range(arguments.steps):
            loss, weights = step(weights, images, labels)
            losses.append(float(loss))
        return losses[:3]
    infer = jax.jit(forward)
    for _ in range(arguments.steps):
        scores = infer(weights, images).block_until_ready()
    return [float(score) for score in scores[0]]


def main() -> None:
    arguments = parse(__doc__ or "")
    _prepare(arguments)
    finish(arguments, _run(arguments))


if __name__ == "__main__":
    main()
