"""Lost CUDA contexts after a test: which errors of the driver last (700, 715 ...).

After some errors (an illegal address, an illegal instruction), the context answers every later
call with the same error. The outcomes of the process's remaining tests then mean nothing. CUDA
Driver API, CUresult: "This leaves the process in an inconsistent state and any
further CUDA work will return the same error. To continue using CUDA, the process must be
terminated and relaunched."
"""

from __future__ import annotations

import ctypes

from pytest_negativa.devices import loaded_driver

# CUresult values that are documented with the sentence above.
_STICKY = {
    220: "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    721: "CUDA_ERROR_TENSOR_MEMORY_LEAK",
}


def lost_context() -> str | None:
    """The lasting error of a CUDA context of this process, or None.

    It checks the context of the calling thread and all primary contexts. A process that has not
    loaded the driver has no context. Nothing is known of a stub that lacks a function.
    """
    try:
        driver = loaded_driver()
        context, count, found = ctypes.c_void_p(), ctypes.c_int(), None
        if driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value:
            found = _STICKY.get(driver.cuCtxSynchronize())
        # An error leaves the count at 0.
        driver.cuDeviceGetCount(ctypes.byref(count))
        errors = (_lost_primary(driver, index) for index in range(count.value))
        return found or next(filter(None, errors), None)
    except (OSError, AttributeError):
        return None


def _lost_primary(driver: ctypes.CDLL, device: int) -> str | None:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    status = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    if status != 0 or not active.value:
        return _STICKY.get(status)
    context = ctypes.c_void_p()
    status = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status != 0:
        return _STICKY.get(status)
    try:
        status = driver.cuCtxPushCurrent_v2(context)
        if status == 0:
            status = driver.cuCtxSynchronize()
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        return _STICKY.get(status)
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)
