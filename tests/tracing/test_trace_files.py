"""Trace files: what is written is read, and damage is told, not raised."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.models.trace import (
    UNENDED,
    EndRecord,
    GapRecord,
    KernelRecord,
    LibraryRecord,
    Role,
    TracedLibrary,
)
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.trace_files import TraceWriter, read_trace, require_ended
from tests.support.faults import PlantedFault
from tests.support.traces import header, records, write


def test_what_was_written_is_read(tmp_path: Path) -> None:
    lines = records("k1", "k2")
    trace = read_trace(write(tmp_path, header(), lines, end=False))
    assert trace.header == replace(header(), locked=True, lost=False)
    assert list(trace.records) == lines
    assert not trace.torn and not trace.problems


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    path = write(tmp_path, header(), [])
    with pytest.raises(StoreError, match="cannot be created"):
        TraceWriter(path, header())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        (b'{"record":"head', "empty"),
        (
            b'{"record":"header","format":99,"new":[1]}\n{"record":"?"}\n',
            "not a header of this release: Invalid enum value 99 - at `$.format`; record it again",
        ),
        (
            b'{"record":"header","format_version":1}\n{"record":"?"}\n',
            "contains unknown field `format_version`; record it again",
        ),
        (b'{"record":"end","time_ns":1}\n', "no header"),
        (b"\xff\xfe\n", "line 1"),
        (b"null\n", "line 1"),
    ],
)
def test_a_trace_without_header_has_a_problem(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    trace = read_trace(path)
    assert trace.header is None
    assert problem in trace.problems[0]


@pytest.mark.parametrize(
    "line",
    [
        b'{"record":"from-the-future"}',
        b'{"record":"kernel","image":"one","name":"k","context":1}',
        b'{"record":"kernel","image":1,"name":"k","context":1,"extra":1}',
        b"\x80",
        b"{",
    ],
)
def test_a_damaged_line_costs_only_itself(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, header(), records("k1"), end=False)
    path.write_bytes(path.read_bytes() + line + b'\n{"record":"end","time_ns":9}\n')
    trace = read_trace(path)
    assert len(trace.problems) == 1 and trace.problems[0].startswith("line 7")
    assert len(trace.records) == len(records("k1")) + 1


def test_many_damaged_lines_and_long_ones_cost_little(tmp_path: Path) -> None:
    path = write(tmp_path, header(), records("k1"))
    before = len(read_trace(path).records)
    with path.open("ab") as file:
        file.write(b"{}\n" * 1000 + b"x" * (17 << 20) + b"\n")
        file.write(b'{"record":"end","time_ns":9}\n')
    trace = read_trace(path)
    assert len(trace.problems) == 100
    assert len(trace.records) == before + 1


def test_a_second_header_is_a_problem(tmp_path: Path) -> None:
    path = write(tmp_path, header(), [])
    path.write_bytes(path.read_bytes() * 2)
    assert "second header" in read_trace(path).problems[0]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no\.jsonl: cannot be read"):
        read_trace(tmp_path / "no.jsonl")


@pytest.mark.planted_fault(
    "The trace of a test process reaches the limit of file sizes, or a quota",
    says="a record could not be written: is the disk full, or a quota reached?",
)
def test_a_failed_write_is_noted_and_not_raised(tmp_path: Path, fault: PlantedFault) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from tests.support.traces import *\n"
        "_soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))\n"
        "write(Path(sys.argv[1]), header(), records(*['k' * 50] * 30))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # for what measures the test\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    (path,) = tmp_path.iterdir()
    trace = read_trace(path)
    assert trace.header is not None and trace.header.lost and trace.torn
    assert not any(isinstance(record, EndRecord) for record in trace.records)
    lack, unended = merge_traces([path]).incomplete
    assert lack.process is None and unended.code == UNENDED
    fault.check(lack.text)


@pytest.mark.planted_fault(
    "A process loads a library whose path is not UTF-8, which a trace can't hold.",
    says="a record could not be written",
)
def test_a_path_that_is_not_utf8(tmp_path: Path, fault: PlantedFault) -> None:
    library = LibraryRecord(id=1, library=TracedLibrary(path="/lib\udcff.so"))

    path = write(tmp_path, header(), [library, *records("k1")])

    lack, unended = merge_traces([path]).incomplete
    assert lack.process is None and unended.code == UNENDED
    fault.check(lack.text)


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.jsonl", header())

    def write_many(thread: int) -> None:
        for index in range(200):
            writer.write(KernelRecord(image=thread, name="n" * index, context=1))

    threads = [threading.Thread(target=write_many, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    trace = read_trace(writer.path)
    assert not trace.problems and len(trace.records) == 800


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.support.traces import *\n"
        "write(Path(sys.argv[1]), header(os.getpid()), records('k1', 'k2'), end=False)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (path,) = tmp_path.iterdir()
    trace = read_trace(path)
    assert [r.name for r in trace.records if isinstance(r, KernelRecord)] == ["k1", "k2"]


def test_a_gap_of_a_recording_keeps_its_key(tmp_path: Path) -> None:
    path = write(tmp_path, header(), [])
    with path.open("a") as file:
        file.write('{"record":"gap","id":1,"why":"off","context":0,"time_ns":1}\n')
    *_, gap = read_trace(path).records
    assert isinstance(gap, GapRecord) and gap.reason == "off"


@pytest.mark.planted_fault(
    "A child process still uses the GPU when the traces are merged",
    says="it is still running",
)
def test_a_process_that_still_runs(tmp_path: Path, fault: PlantedFault) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from pytest_negativa.tracing.trace_files import TraceWriter\n"
        "from tests.support.traces import *\n"
        "writer = TraceWriter(Path(sys.argv[1], 'x.jsonl'), header(role=Role.CHILD))\n"
        "print(flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        [lack] = merge_traces(tmp_path.iterdir()).incomplete
        with pytest.raises(StoreError, match="its process is still running; wait for its end"):
            require_ended(tmp_path.iterdir())
        process.communicate(b"\n")
    assert lack.process is None
    fault.check(lack.text)
    # It is gone now, and no write had failed: nothing is lost.
    assert not merge_traces(tmp_path.iterdir()).incomplete


@pytest.mark.planted_fault(
    "Nothing tells whether the process of a trace without an end is gone",
    says="its trace has no end, and nothing tells whether it has ended",
)
def test_a_process_without_a_lock(tmp_path: Path, fault: PlantedFault) -> None:
    path = write(tmp_path, header(role=Role.CHILD), [], end=False)
    path.write_bytes(path.read_bytes().replace(b'"locked":true', b'"locked":false'))
    [lack] = merge_traces([path]).incomplete
    fault.check(lack.text)
