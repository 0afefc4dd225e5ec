"""A program that uses the GPU: ``program.py DRIVER LIBRARY OFFSET KERNEL...``."""

import ctypes
import sys

driver = ctypes.CDLL(sys.argv[1])
assert driver.cuInit(0) == 0
# l_addr comes first in struct link_map.
base = ctypes.c_size_t.from_address(ctypes.CDLL(sys.argv[2])._handle).value
library, kernel = ctypes.c_uint64(), ctypes.c_uint64()
driver.cuLibraryLoadData(ctypes.byref(library), ctypes.c_void_p(base + int(sys.argv[3])))
for name in sys.argv[4:]:
    driver.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode())
