"""How many bytes this process reads, as the kernel counts them: proc_pid_io(5).

The kernel counts the bytes that it copies from file to file, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.builders import ElementSpec, build_region
from tests.support.compacting import build

_IO = Path("/proc/self/io")
counts_bytes = pytest.mark.skipif(not _IO.exists(), reason="needs the kernel's accounting of I/O")

MB = 1 << 20
LITTLE = MB
"""More than all tables, and what a test itself reads, have."""


@contextmanager
def bytes_read() -> Iterator[Callable[[], int]]:
    """What it yields returns the bytes that were read since."""

    def count() -> int:
        return int(_IO.read_text().split()[1])

    before = count()
    yield lambda: count() - before


def large_library(folder: Path) -> Path:
    """A library with eight elements of 2 MB, for the SM archs 90 to 97."""
    chance = random.Random(5)
    specs = [ElementSpec(content=chance.randbytes(2 * MB), arch=90 + i) for i in range(8)]
    return build(folder, "-s", fatbin=b"".join(build_region([spec]) for spec in specs))
