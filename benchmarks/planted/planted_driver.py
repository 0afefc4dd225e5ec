"""The CUDA driver and nvJitLink, as planted needs call them; a suite may bring its own."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

# Of nvJitLinkInputType in nvJitLink.h.
_LTO_IR, _FATBIN = 3, 4


def load_module(image: bytes) -> str:
    """Load an image that lies in memory, into the context of PyTorch or the like.

    Returns:
        The error codes of the driver.
    """
    cuda = _driver()
    context, module = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        cuda.cuCtxSetCurrent(context)
    error = cuda.cuModuleLoadData(ctypes.byref(module), _aligned(image))
    if not error:
        cuda.cuModuleUnload(module)
    return f"cuModuleLoadData {error}"


def look_up(address: int, kernel: str) -> str:
    """Load the region at an address, and look up a kernel by its mangled name.

    Returns:
        The error codes of the driver.
    """
    cuda = _driver()
    library, found = ctypes.c_void_p(), ctypes.c_void_p()
    error = cuda.cuLibraryLoadData(
        ctypes.byref(library), ctypes.c_void_p(address), None, None, 0, None, None, 0
    )
    if error:
        return f"cuLibraryLoadData {error}"
    error = cuda.cuLibraryGetKernel(ctypes.byref(found), library, kernel.encode())
    return f"cuLibraryLoadData 0, cuLibraryGetKernel {error}"


def link(address: int, size: int, image: bytes | None, arch: str) -> str:
    """Link LTO-IR for an arch, such as ``sm_90``.

    Args:
        address, size: where it lies, in bytes; nvJitLink reads it there.
        image: a fatbin with it, if it is compressed.

    Returns:
        The error codes of nvJitLink.
    """
    linker = ctypes.CDLL(_linker_name())
    words = (ctypes.c_char_p * 2)(b"-lto", f"-arch={arch}".encode())
    handle = ctypes.c_void_p()
    codes = [linker.nvJitLinkCreate(ctypes.byref(handle), 2, words)]
    if not codes[0]:
        kind, data, count = _LTO_IR, ctypes.c_void_p(address), size
        if image is not None:
            kind, data, count = _FATBIN, ctypes.cast(_aligned(image), ctypes.c_void_p), len(image)
        codes.append(
            linker.nvJitLinkAddData(handle, kind, data, ctypes.c_size_t(count), b"planted")
        )
        codes.append(linker.nvJitLinkComplete(handle))
        linker.nvJitLinkDestroy(ctypes.byref(handle))
    return f"nvJitLink {codes}"


def _driver() -> ctypes.CDLL:
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuInit(0)
    return cuda


def _linker_name() -> str:
    """That of the process, if it has one: by its name, so that it is not opened anew."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"/(libnvJitLink\.so[.\d]*)$", maps, re.MULTILINE)
    return found[1] if found else "libnvJitLink.so.13"


def _aligned(image: bytes) -> ctypes.Array[ctypes.c_uint64]:
    """A copy at a multiple of 8, as a fatbin must be."""
    copy = (ctypes.c_uint64 * (len(image) // 8 + 1))()
    ctypes.memmove(copy, image, len(image))
    return copy
