"""Makes trace files, record by record, as a traced process would write them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pytest_negativa.models.trace import (
    AnyTraceRecord,
    Context,
    ContextRecord,
    Device,
    DeviceRecord,
    EndRecord,
    Header,
    ImageForm,
    ImageRecord,
    KernelRecord,
    LibraryRecord,
    Phase,
    Role,
    TracedLibrary,
)
from pytest_negativa.storage.runs import TRACE_SUFFIX
from pytest_negativa.tracing.trace_files import TraceWriter

RUN = "20260102T030405Z-abcdef"
LIBRARY = TracedLibrary(path="/site-packages/a/lib.so", size=10, mtime_ns=1, build_id="aa")
DEVICE = Device(name="NVIDIA H200", compute_capability="9.0", uuid="GPU-0", cuda_version=13000)


def header(pid: int = 7, role: Role = Role.SOLO, run_id: str = RUN, start_ns: int = 5) -> Header:
    return Header(
        run_id=run_id,
        pid=pid,
        ppid=1,
        role=role,
        detector="test",
        executable="/usr/bin/python3",
        argv=("pytest",),
        start_ns=start_ns,
        root="/project",
    )


def records(
    *kernels: str, nodeid: str = "test_a.py::test_a", time_ns: int = 100, offset: int = 0x40
) -> list[AnyTraceRecord]:
    """A library with one image, of which kernels were looked up in one test."""
    context = Context(phase=Phase.CALL, nodeid=nodeid)
    return [
        DeviceRecord(device=DEVICE),
        LibraryRecord(id=1, library=LIBRARY),
        ContextRecord(id=2, context=context, time_ns=time_ns),
        ImageRecord(
            id=3,
            form=ImageForm.FATBIN,
            call="cuLibraryLoadData",
            context=2,
            library=1,
            offset=offset,
            size=64,
        ),
        *(KernelRecord(image=3, name=name, context=2) for name in kernels),
    ]


def write(folder: Path, head: Header, lines: Sequence[AnyTraceRecord], *, end: bool = True) -> Path:
    writer = TraceWriter(
        folder / f"{head.run_id}.{head.pid}.{os.urandom(4).hex()}{TRACE_SUFFIX}", head
    )
    for line in lines:
        writer.write(line)
    if end:
        writer.write(EndRecord(time_ns=1000))
    writer.close()
    return writer.path
