"""The class of an exception and the CUDA errors that it names; its other words differ by chance."""

from __future__ import annotations

import re
import traceback

# Names of errors in cuda.h, driver_types.h and the headers of NVIDIA's libraries, and what
# cudaGetErrorString and PyTorch make of those that missing or damaged code gives.
_WORDS = re.compile(
    r"""\b(?:CUDA_ERROR|CUBLAS|CUDNN|CUFFT|CURAND|CUSOLVER|CUSPARSE|NVJITLINK|NVRTC)_[A-Z_]+\b
    | \bcudaError[A-Z]\w+
    | \bCUDA\ (?:driver\ )?error\b
    | \bno\ kernel\ image\ is\ available\b
    | \bkernel\ image\ is\ invalid\b
    | \bsymbol\ not\ found\b
    | \binvalid\ device\ (?:function|symbol)\b
    | \binvalid\ resource\ handle\b
    | \bunsupported\ (?:PTX\ version|toolchain)\b
    | \bPTX\ JIT\ compil
    | \billegal\ (?:instruction|memory\ access)\b
    | \bmisaligned\ address\b
    | \binvalid\ program\ counter\b
    | \bdevice-side\ assert\b
    | \bunspecified\ launch\ failure\b
    """,
    re.VERBOSE,
)


def describe_error(error: BaseException) -> str:
    """The exception's class, and the CUDA errors that it, its causes and its parts name."""
    # Without frames: their source lines are no part of the error.
    text = " ".join("".join(traceback.format_exception(error, limit=0)).split())
    named = sorted({match.group() for match in _WORDS.finditer(text)})
    return f"{type(error).__name__} ({', '.join(named)})" if named else type(error).__name__
