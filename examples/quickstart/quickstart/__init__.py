"""Vectors, matrices, statistics and images on the GPU: a thin wrapper of libquickstart.so.

Importing it loads the library, which needs no GPU; calling any of its functions does.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

LIBRARY = Path(__file__).with_name("libquickstart.so")

_library = ctypes.CDLL(str(LIBRARY))


class QuickstartError(RuntimeError):
    """The GPU, or the driver, didn't do what it was asked for."""


def device_name() -> str:
    """The first GPU's name.

    Raises:
        QuickstartError: there is no driver, or no GPU.
    """
    name = ctypes.create_string_buffer(128)
    _call("device", name, len(name))
    return name.value.decode()


def add(a: Sequence[float], b: Sequence[float]) -> array[float]:
    """Add two vectors."""
    _same_length(a, b)
    out = _zeros(len(a))
    _call("add", _floats(a), _floats(b), _address(out), len(a))
    return out


def scale(values: Sequence[float], factor: float) -> array[float]:
    """Multiply each value by a factor."""
    out = _zeros(len(values))
    _call("scale", _floats(values), ctypes.c_float(factor), _address(out), len(values))
    return out


def clamp(values: Sequence[float], low: float, high: float) -> array[float]:
    """Replace values below ``low`` by it, and values above ``high``."""
    out = _zeros(len(values))
    bounds = ctypes.c_float(low), ctypes.c_float(high)
    _call("clamp", _floats(values), *bounds, _address(out), len(values))
    return out


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """The scalar product of two vectors."""
    _same_length(a, b)
    out = _zeros(1)
    _call("dot", _floats(a), _floats(b), _address(out), len(a))
    return out[0]


def multiply(
    a: Sequence[float], b: Sequence[float], rows: int, inner: int, columns: int
) -> array[float]:
    """Multiply a matrix of rows x inner by one of inner x columns, both row-major."""
    if len(a) != rows * inner or len(b) != inner * columns:
        shapes = f"{rows} x {inner} and {inner} x {columns}"
        raise ValueError(f"{len(a)} and {len(b)} values, expected {shapes}")
    out = _zeros(rows * columns)
    _call("multiply", _floats(a), _floats(b), _address(out), rows, inner, columns)
    return out


def transpose(values: Sequence[float], rows: int, columns: int) -> array[float]:
    """Transpose a row-major matrix."""
    if len(values) != rows * columns:
        raise ValueError(f"{len(values)} values, expected {rows} x {columns}")
    out = _zeros(len(values))
    _call("transpose", _floats(values), _address(out), rows, columns)
    return out


def set_weights(weights: Sequence[float]) -> None:
    """Set the four weights that ``weighted_sum`` gives to the values in turn."""
    if len(weights) != 4:
        raise ValueError(f"{len(weights)} weights, expected 4")
    _call("set_weights", _floats(weights))


def weighted_sum(values: Sequence[float]) -> float:
    """Sum values times weights."""
    out = _zeros(1)
    _call("weighted_sum", _floats(values), _address(out), len(values))
    return out[0]


def variance(values: Sequence[float]) -> float:
    """The variance of a whole population."""
    out = _zeros(1)
    _call("variance", _floats(values), _address(out), len(values))
    return out[0]


def histogram(values: Sequence[float], bins: int) -> list[int]:
    """Count the values in each of ``bins`` parts of [0, 1)."""
    counts = (ctypes.c_uint * bins)()
    _call("histogram", _floats(values), counts, bins, len(values))
    return list(counts)


def threshold(pixels: bytes, limit: int) -> bytes:
    """Turn pixels white from ``limit`` on, and the others black."""
    out = ctypes.create_string_buffer(len(pixels))
    _call("threshold", pixels, out, ctypes.c_ubyte(limit), len(pixels))
    return out.raw


def flip(pixels: bytes, width: int, height: int) -> bytes:
    """Mirror an image from left to right."""
    return _image("flip", pixels, width, height)


def blur(pixels: bytes, width: int, height: int) -> bytes:
    """Replace each pixel by the mean of it and its neighbours."""
    return _image("blur", pixels, width, height)


def _image(name: str, pixels: bytes, width: int, height: int) -> bytes:
    if len(pixels) != width * height:
        raise ValueError(f"{len(pixels)} pixels, expected {width} x {height}")
    out = ctypes.create_string_buffer(len(pixels))
    _call(name, pixels, out, width, height)
    return out.raw


def _call(name: str, *arguments: object) -> None:
    if _library[f"quickstart_{name}"](*arguments):
        text = ctypes.create_string_buffer(128)
        _library.quickstart_error(text, ctypes.c_size_t(len(text)))
        raise QuickstartError(text.value.decode())


def _same_length(a: Sequence[float], b: Sequence[float]) -> None:
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values, expected as many")


def _floats(values: Iterable[float]) -> ctypes.Array[ctypes.c_float]:
    return _address(array("f", values))


def _address(values: array[float]) -> ctypes.Array[ctypes.c_float]:
    # Shares the array's memory, and keeps it alive.
    return (ctypes.c_float * len(values)).from_buffer(values)


def _zeros(count: int) -> array[float]:
    return array("f", bytes(4 * count))
