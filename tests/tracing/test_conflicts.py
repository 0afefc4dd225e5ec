"""Who may hold CUPTI."""

from __future__ import annotations

from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.cupti import busy_message, suspects


def test_suspects() -> None:
    assert suspects(["/nsight/libToolsInjection64.so"], {}) == ("NVIDIA Nsight Systems (nsys)",)
    assert suspects(["/x/libtorch_cpu.so"], {})[0].startswith("torch.profiler")
    chained = {"NEGATIVA_CHAINED_INJECTION": "/t.so", "CUDA_INJECTION64_PATH": "/ours.so"}
    assert suspects([], chained) == ("the library in CUDA_INJECTION64_PATH (/t.so)",)
    ranges = {"NVTX_INJECTION64_PATH": str(injection_library())}
    assert "no other trace" in busy_message(None, [], ranges)
    assert '"CUPTI for nvtool"' in busy_message("CUPTI for nvtool", [], {})
    assert "not provided" not in busy_message("CUPTI for <not provided>", [], {})
