"""What a process may have used without a trace keeps every library, also those it doesn't list."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.models.trace import (
    AnyTraceRecord,
    Context,
    ContextRecord,
    DeviceRecord,
    ImageForm,
    ImageRecord,
    LibraryRecord,
    Phase,
    Role,
    WarningRecord,
)
from pytest_negativa.tracing.libraries import identify_library
from pytest_negativa.tracing.merge import merge_traces
from tests.support.analyses import settings
from tests.support.faults import PlantedFault
from tests.support.libraries import MULTIARCH
from tests.support.traces import DEVICE, header, write


def whole_trace(folder: Path) -> Path:
    """Of a process that ended and used one of the library's three regions."""
    region = next(iter(read_library(MULTIARCH, Scope(headers_only=True)).iter_regions()))
    start = region.span.start
    lines: list[AnyTraceRecord] = [
        DeviceRecord(device=DEVICE),
        LibraryRecord(id=1, library=identify_library(str(MULTIARCH))),
        ContextRecord(id=2, context=Context(phase=Phase.PROCESS), time_ns=1),
        ImageRecord(id=3, form=ImageForm.FATBIN, call="load", context=2, library=1, offset=start),
    ]
    return write(folder, header(), lines)


def kept(folder: Path, *traces: Path) -> str:
    """Why all code of the library is kept; empty if some is unused."""
    [library] = analyze(merge_traces(traces), settings(folder)).libraries
    whole = all(decision.kept for decision in library.plan.decisions)
    return " ".join(library.plan.notes) if whole else ""


def lack(code: str, text: str) -> list[AnyTraceRecord]:
    return [WarningRecord(code=code, text=text, incomplete=True)]


def test_without_a_lack_code_is_unused(tmp_path: Path) -> None:
    gone = write(tmp_path, header(8, Role.CHILD), [], end=False)
    assert kept(tmp_path, whole_trace(tmp_path), gone) == ""


@pytest.mark.planted_fault(
    "A profiler holds CUPTI in a pytest-xdist worker, so that the worker is not traced",
    says="process 8 (python3): CUPTI is taken",
)
@pytest.mark.parametrize("ended", [True, False])
def test_taken_cupti(tmp_path: Path, fault: PlantedFault, ended: bool) -> None:
    lines = lack("cupti-taken", "CUPTI is taken")
    worker = write(tmp_path, header(8, Role.WORKER), lines, end=ended)
    fault.check(kept(tmp_path, whole_trace(tmp_path), worker))


@pytest.mark.planted_fault(
    "A child process starts CUDA without CUPTI and ends by os._exit, before it lists a library",
    says="process 8 (python3): libcupti.so.13: cannot open",
)
def test_child_without_cupti(tmp_path: Path, fault: PlantedFault) -> None:
    lines = lack("cupti-unavailable", "libcupti.so.13: cannot open")
    child = write(tmp_path, header(8, Role.CHILD), lines, end=False)
    fault.check(kept(tmp_path, whole_trace(tmp_path), child))


@pytest.mark.planted_fault(
    "A line of a process's trace is damaged, which named the library that the process used",
    says="line 2: Expected",
)
def test_damaged_line(tmp_path: Path, fault: PlantedFault) -> None:
    damaged = write(tmp_path, header(8, Role.CHILD), lack("gap", "x"))
    damaged.write_bytes(damaged.read_bytes().replace(b'"code":"gap"', b'"code":7'))
    fault.check(kept(tmp_path, whole_trace(tmp_path), damaged))


@pytest.mark.planted_fault(
    "A pytest-xdist worker is killed in a test before that test loads a library",
    says="process 8 (python3): it did not end by itself",
)
def test_lost_worker(tmp_path: Path, fault: PlantedFault) -> None:
    worker = write(tmp_path, header(8, Role.WORKER), [], end=False)
    fault.check(kept(tmp_path, whole_trace(tmp_path), worker))


@pytest.mark.planted_fault(
    "A process is killed after a test that switched tracing off, before it lists its libraries",
    says="process 8 (python3): the detector was off",
)
def test_gap_of_a_killed_process(tmp_path: Path, fault: PlantedFault) -> None:
    lines = lack("gap", "the detector was off")
    child = write(tmp_path, header(8, Role.CHILD), lines, end=False)
    fault.check(kept(tmp_path, whole_trace(tmp_path), child))
