"""Vectors, matrices, statistics, images, signals and sorting on the GPU, by libquickstart.so.

Importing it loads the library, which needs no GPU; calling any of its functions does. Series are
arrays of type ``f`` (float), ``d`` (double) or ``i`` (int), and the kernel is that of this type.
Functions of several steps name them by NVTX ranges.
"""

from __future__ import annotations

import contextlib
import ctypes
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

LIBRARY = Path(__file__).with_name("libquickstart.so")

Series: TypeAlias = "array[Any]"
Argument: TypeAlias = "Series | bytearray | int | ctypes.c_float | ctypes.c_double"

_library = ctypes.CDLL(str(LIBRARY))


class QuickstartError(RuntimeError):
    """The GPU, or the driver, didn't do what it was asked for."""


def device_name() -> str:
    """The first GPU's name.

    Raises:
        QuickstartError: there is no driver, or no GPU.
    """
    name = ctypes.create_string_buffer(128)
    _check(_library.quickstart_device(name, len(name)))
    return name.value.decode()


# Vectors


def add(a: Series, b: Series) -> Series:
    """Add two vectors."""
    return _binary("Add", a, b)


def subtract(a: Series, b: Series) -> Series:
    """Subtract the second vector from the first."""
    return _binary("Subtract", a, b)


def times(a: Series, b: Series) -> Series:
    """Multiply two vectors value by value."""
    return _binary("Multiply", a, b)


def divide(a: Series, b: Series) -> Series:
    """Divide two vectors value by value; by 0 gives 0."""
    return _binary("Divide", a, b)


def minimum(a: Series, b: Series) -> Series:
    """The smaller value of each pair."""
    return _binary("Minimum", a, b)


def maximum(a: Series, b: Series) -> Series:
    """The larger value of each pair."""
    return _binary("Maximum", a, b)


def unary(operation: str, values: Series) -> Series:
    """Apply an operation of src/vectors.cu to each value, such as ``Exp`` or ``Relu``."""
    out = _zeros(values, len(values))
    name = f"5unaryINS_{len(operation)}{operation}E{values.typecode}EEvPKT0_PS2_i"
    _run("vectors", name, _line(values), values, out, len(values))
    return out


def scale(values: Series, factor: float) -> Series:
    """Multiply each value by a factor."""
    out = _zeros(values, len(values))
    name = f"5scaleI{values.typecode}EEvPKT_S1_PS1_i"
    _run("vectors", name, _line(values), values, _number(values, factor), out, len(values))
    return out


def clamp(values: Series, low: float, high: float) -> Series:
    """Replace values below ``low`` by it, and values above ``high``."""
    out = _zeros(values, len(values))
    bounds = _number(values, low), _number(values, high)
    name = f"5clampI{values.typecode}EEvPKT_S1_S1_PS1_i"
    _run("vectors", name, _line(values), values, *bounds, out, len(values))
    return out


# Matrices, row-major


def multiply(a: Series, b: Series, rows: int, inner: int, columns: int) -> Series:
    """Multiply a matrix of rows x inner by one of inner x columns."""
    if len(a) != rows * inner or len(b) != inner * columns:
        shapes = f"{rows} x {inner} and {inner} x {columns}"
        raise ValueError(f"{len(a)} and {len(b)} values, expected {shapes}")
    # Larger tiles read less memory but leave small matrices with few blocks.
    tile = 8 if rows * columns < 256 else 16 if rows * columns < 512 * 512 else 32
    out = _zeros(a, rows * columns)
    name = f"8multiplyI{a.typecode}Li{tile}EEEvPKT_S3_PS1_iii"
    _run("matrices", name, _tiles(columns, rows, tile), a, b, out, rows, inner, columns)
    return out


def transpose(values: Series, rows: int, columns: int) -> Series:
    """Transpose a matrix."""
    out = _zeros(values, rows * columns)
    name = f"9transposeI{values.typecode}EEvPKT_PS1_ii"
    _run("matrices", name, _tiles(columns, rows), values, out, rows, columns)
    return out


def add_to_columns(values: Series, added: Series, rows: int, columns: int) -> Series:
    """Add a value of its own to each column."""
    out = _zeros(values, rows * columns)
    name = f"14add_to_columnsI{values.typecode}EEvPKT_S3_PS1_ii"
    _run("matrices", name, _tiles(columns, rows), values, added, out, rows, columns)
    return out


def solve(systems: Series, right: Series, size: int) -> Series:
    """Solve systems of ``size`` linear equations, 2 to 4, without pivoting."""
    out = _zeros(right, len(right))
    name = f"5solveI{right.typecode}Li{size}EEEvPKT_S3_PS1_i"
    _run("matrices", name, _line(right), systems, right, out, len(right) // size)
    return out


# Statistics


def total(values: Series) -> float:
    """The sum of all values."""
    return _reduce("Sum", values)


def product(values: Series) -> float:
    """The product of all values."""
    return _reduce("Product", values)


def smallest(values: Series) -> float:
    """The smallest value."""
    return _reduce("Minimum", values)


def largest(values: Series) -> float:
    """The largest value."""
    return _reduce("Maximum", values)


def variance(values: Series) -> float:
    """The variance of a whole population."""
    out = _zeros(values, 1)
    name = f"8varianceI{values.typecode}EEvPKT_PS1_i"
    _run("statistics", name, _ONE_BLOCK, values, out, len(values))
    return float(out[0])


def running_sum(values: Series) -> Series:
    """The sums up to each value."""
    out = _zeros(values, len(values))
    name = f"11running_sumI{values.typecode}EEvPKT_PS1_i"
    _run("statistics", name, _ONE_BLOCK, values, out, len(values))
    return out


def histogram(values: Series, bins: int) -> list[int]:
    """Count the values in each of ``bins`` parts of [0, 1)."""
    counts = array("i", bytes(4 * bins))
    name = f"9histogramI{values.typecode}EEvPKT_Piii"
    _run("statistics", name, _ONE_BLOCK, values, counts, bins, len(values))
    return counts.tolist()


# Images, greyscale, one byte a pixel


def threshold(pixels: bytes, limit: int) -> bytes:
    """Turn pixels white from ``limit`` on, and the others black."""
    out = bytearray(len(pixels))
    grid = _line(pixels)
    _run("images", "9thresholdEPKhPhii", grid, bytearray(pixels), out, limit, len(pixels))
    return bytes(out)


def flip(pixels: bytes, width: int, height: int) -> bytes:
    """Mirror an image from left to right."""
    return _image("4flipE", pixels, width, height)


def rotate(pixels: bytes, width: int, height: int) -> bytes:
    """Turn an image clockwise."""
    return _image("6rotateE", pixels, width, height)


def blur(pixels: bytes, width: int, height: int, radius: int = 1) -> bytes:
    """Replace each pixel by the mean of its neighbourhood."""
    return _image(f"4blurILi{radius}EEEv", pixels, width, height)


def median(pixels: bytes, width: int, height: int, radius: int = 1) -> bytes:
    """Replace each pixel by the median of its neighbourhood."""
    return _image(f"6medianILi{radius}EEEv", pixels, width, height)


def outline(pixels: bytes, width: int, height: int, limit: int = 128) -> bytes:
    """Draw the edges of what is in an image."""
    with _range("outline"):
        with _range("denoise"):
            smooth = blur(pixels, width, height)
        with _range("edges"):
            edges = _image("5edgesE", smooth, width, height)
        return threshold(edges, limit)


# Signals


def smooth(values: Series, taps: Series) -> Series:
    """Filter a series with 3, 5, 9, 17 or 33 taps."""
    out = _zeros(values, len(values))
    name = f"6filterI{values.typecode}Li{len(taps)}EEEvPKT_S3_PS1_i"
    _run("signals", name, _line(values), values, taps, out, len(values))
    return out


def fourier(values: Series, length: int) -> Series:
    """Transform each ``length`` complex numbers; 4, 8, 16 or 32."""
    out = _zeros(values, len(values))
    name = f"9transformI{values.typecode}Li{length}EEEvPKT_PS1_i"
    _run("fourier", name, _line(values), values, out, len(values) // (2 * length))
    return out


# Sorting


def sort(values: Series) -> Series:
    """Sort a series."""
    out = _zeros(values, len(values))
    _run(
        "sorting", f"6seriesI{values.typecode}EEvPKT_PS1_i", _line(values), values, out, len(values)
    )
    return out


def sort_rows(values: Series, length: int) -> Series:
    """Sort each row of ``length`` values; 4, 8, 16 or 32."""
    out = _zeros(values, len(values))
    name = f"4rowsI{values.typecode}Li{length}EEEvPKT_PS1_i"
    _run("sorting", name, _line(values), values, out, len(values) // length)
    return out


# A layer of a neural network, of several steps


def standardise(values: Series) -> Series:
    """Scale values to a mean of 0 and a variance of 1."""
    with _range("standardise"):
        with _range("moments"):
            mean, deviation = total(values) / len(values), variance(values) ** 0.5
        means = array(values.typecode, [mean]) * len(values)
        return scale(subtract(values, means), 1 / deviation)


def softmax(values: Series) -> Series:
    """Turn scores into probabilities."""
    with _range("softmax"):
        with _range("shift"):
            shifted = subtract(values, array(values.typecode, [largest(values)]) * len(values))
        powers = unary("Exp", shifted)
        return scale(powers, 1 / total(powers))


def layer(inputs: Series, weights: Series, bias: Series, rows: int) -> Series:
    """A linear layer and its activation: relu(inputs x weights + bias)."""
    columns = len(bias)
    with _range("layer"):
        out = multiply(inputs, weights, rows, len(weights) // columns, columns)
        return unary("Relu", add_to_columns(out, bias, rows, columns))


# Grids of blocks of threads: ((x, y), (x, y)).
_Grid: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
_ONE_BLOCK: _Grid = (1, 1), (256, 1)


def _line(values: Series | bytes) -> _Grid:
    return (-(-len(values) // 256), 1), (256, 1)


def _tiles(columns: int, rows: int, tile: int = 16) -> _Grid:
    return (-(-columns // tile), -(-rows // tile)), (tile, tile)


def _binary(operation: str, a: Series, b: Series) -> Series:
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values, expected as many")
    out = _zeros(a, len(a))
    name = f"6binaryINS_{len(operation)}{operation}E{a.typecode}EEvPKT0_S4_PS2_i"
    _run("vectors", name, _line(a), a, b, out, len(a))
    return out


def _reduce(operation: str, values: Series) -> float:
    out = _zeros(values, 1)
    name = f"6reduceINS_{len(operation)}{operation}E{values.typecode}EEvPKT0_PS2_i"
    _run("statistics", name, _ONE_BLOCK, values, out, len(values))
    return float(out[0])


def _image(name: str, pixels: bytes, width: int, height: int) -> bytes:
    if len(pixels) != width * height:
        raise ValueError(f"{len(pixels)} pixels, expected {width} x {height}")
    out = bytearray(len(pixels))
    grid = _tiles(width, height)
    _run("images", f"{name}PKhPhii", grid, bytearray(pixels), out, width, height)
    return bytes(out)


def _zeros(like: Series, count: int) -> Series:
    return array(like.typecode, bytes(like.itemsize * count))


def _number(like: Series, value: float) -> Argument:
    """The value as the kernel for this type takes it."""
    types = {"f": ctypes.c_float, "d": ctypes.c_double}
    return types[like.typecode](value) if like.typecode in types else int(value)


class _Argument(ctypes.Structure):
    """``struct argument`` of src/quickstart.c."""

    _fields_ = [
        ("host", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("is_array", ctypes.c_int),
    ]


def _run(module: str, name: str, grid: _Grid, *arguments: Argument) -> None:
    """Run a kernel.

    Args:
        module: its source file and namespace.
        name: its mangled name behind that of the namespace.
        grid: of threads.
        arguments: arrays, which it may change, and numbers.
    """
    held = [_buffer(argument) for argument in arguments]
    packed = (_Argument * len(held))(
        *(
            (
                ctypes.addressof(memory),
                ctypes.sizeof(memory),
                isinstance(argument, array | bytearray),
            )
            for memory, argument in zip(held, arguments, strict=True)
        )
    )
    sides = [(ctypes.c_uint * 2)(*side) for side in grid]
    mangled = f"_ZN{len(module)}{module}{name}".encode()
    _check(_library.quickstart_run(module.encode(), mangled, *sides, packed, len(held)))


def _buffer(argument: Argument) -> Any:
    """Memory that holds an argument; that of an array is shared."""
    if isinstance(argument, array | bytearray):
        size = len(argument) * (argument.itemsize if isinstance(argument, array) else 1)
        return (ctypes.c_char * size).from_buffer(argument)
    return ctypes.c_int(argument) if isinstance(argument, int) else argument


def _check(status: int) -> None:
    if status:
        text = ctypes.create_string_buffer(128)
        _library.quickstart_error(text, ctypes.c_size_t(len(text)))
        raise QuickstartError(text.value.decode())


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    _library.quickstart_range_begin(name.encode())
    try:
        yield
    finally:
        _library.quickstart_range_end()
