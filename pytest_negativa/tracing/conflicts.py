"""Other holders of CUPTI, as far as this shows without asking CUPTI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pytest_negativa.tracing.native import injection_library

# (part of a file name among the mapped libraries, the tool it belongs to)
_LIBRARIES = (
    ("libToolsInjection", "NVIDIA Nsight Systems (nsys)"),
    ("libnvda-injection", "NVIDIA Nsight Systems (nsys)"),
    ("nvperf-target-injection", "NVIDIA Nsight Compute (ncu)"),
    ("libcuda-injection", "NVIDIA Nsight Compute (ncu)"),
    ("libsanitizer-collection", "compute-sanitizer"),
    ("libTreeLauncherTargetInjection", "an NVIDIA Nsight launcher"),
    ("libcudadebugger", "cuda-gdb"),
    ("libproton", "Triton's Proton profiler"),
    ("libnvbit", "NVBit"),
    ("libscorep", "Score-P"),
)
# CUDA_INJECTION64_PATH is not among them: in a traced process it is ours, and what the user had
# set there stands in the other one.
_VARIABLES = (
    ("NEGATIVA_CHAINED_INJECTION", "the library in CUDA_INJECTION64_PATH"),
    ("NVTX_INJECTION64_PATH", "the library in NVTX_INJECTION64_PATH"),
    ("NSYS_PROFILING_SESSION_ID", "NVIDIA Nsight Systems (nsys)"),
    ("NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "an NVIDIA Nsight tool"),
    ("NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT", "NVIDIA Nsight Compute (ncu)"),
)


def suspects(libraries: Iterable[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Tools that leave traces in this process, likeliest first."""
    found = dict.fromkeys(
        tool for library in libraries for part, tool in _LIBRARIES if part in library
    )
    for variable, tool in _VARIABLES:
        value = environ.get(variable)
        # At level range, NVTX's variable names the native library.
        if value and value != str(injection_library()):
            found[f"{tool} ({value})" if "library in" in tool else tool] = None
    if not found and any("libkineto" in x or "libtorch_cpu" in x for x in libraries):
        found["torch.profiler, if it is running in this process"] = None
    return tuple(found)


def busy_message(
    subscriber: str | None, libraries: Iterable[str], environ: Mapping[str, str]
) -> str:
    """Name the tools that may hold CUPTI."""
    # CUPTI 13.0 puts it so for a tool that gave no name, as Kineto (torch.profiler) does.
    named = subscriber and "<not provided>" not in subscriber
    who = [f'"{subscriber}"'] if named else []
    who += suspects(libraries, environ)
    return (
        "CUPTI serves one tool at a time and is taken by "
        f"{' or '.join(who) or 'a tool that leaves no other trace'}; run without it to trace"
    )
