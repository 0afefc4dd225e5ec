"""A process that uses the stand-in driver: ``gpu_child.py LIBRARY STATEMENTS``.

``start`` initialises the driver, ``use`` looks up a kernel of a fatbin in LIBRARY.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

DRIVER = ctypes.CDLL(os.environ["STANDIN_DRIVER"])
_LIBRARY = Path(sys.argv[1])
_FATBIN = (0xBA55ED50).to_bytes(4, "little")
_keep: list[object] = []


def start() -> int:
    """Initialise the driver; 0 if that worked."""
    return int(DRIVER.cuInit(0))


def use(name: str, region: int = 0) -> int:
    """Load the region of the library with this number, and look up a kernel; 0 if that worked."""
    with _LIBRARY.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    _keep.append(mapped)
    offset = -1
    for _ in range(region + 1):
        offset = mapped.find(_FATBIN, offset + 1)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + offset
    library, kernel = ctypes.c_uint64(), ctypes.c_uint64()
    DRIVER.cuLibraryLoadData(ctypes.byref(library), ctypes.c_void_p(address))
    return int(DRIVER.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode()))


if __name__ == "__main__":
    exec(sys.argv[2])
