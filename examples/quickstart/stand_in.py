"""Plays the driver, which reads the code that it loads: here the sm_90 code of src/fourier.cu.

Usage: python stand_in.py LIBRARY
"""

from __future__ import annotations

import ctypes
import sys

# Offset and size on disk, see: negativa inspect quickstart --elements
OFFSET, SIZE = 0xA8DB8, 77_323

library = ctypes.CDLL(sys.argv[1])
# The address of the library comes first in struct link_map, see <link.h>.
address = ctypes.c_size_t.from_address(library._handle).value
ctypes.string_at(address + OFFSET, SIZE)
