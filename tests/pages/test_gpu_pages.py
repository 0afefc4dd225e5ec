"""Pages of GPU code that real processes read, in the usage of their run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import asdict, replace

from pytest_negativa.models.spans import PAGE_SIZE, Span
from pytest_negativa.models.trace import LibraryUsage, TracedLibrary, Usage
from pytest_negativa.pages.auditors import watch_environment
from pytest_negativa.pages.gather import with_pages, with_pages_of
from pytest_negativa.pages.page_logs import read_page_logs
from pytest_negativa.pages.page_watch import prepare_logs
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import LOST_NAME, Run
from pytest_negativa.tracing.libraries import state_of
from tests.support.compiling import needs_compiler
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.paged import needs_page_watch
from tests.support.sessions import unmeasured_environ
from tests.support.traces import header
from tests.support.usages import PROCESS, usage_of

pytestmark = needs_page_watch

# The whole pages of its section of fatbins.
SECTION = Span(16384, 81920)
READS = """
import ctypes, sys
base = ctypes.c_size_t.from_address(ctypes.CDLL(sys.argv[1])._handle).value
for offset in map(int, sys.argv[2:]):
    ctypes.string_at(base + offset, 16)
# As tracers read what a program gives to the driver.
with open("/proc/self/mem", "rb", 0) as memory:
    memory.seek(base + 65960)
    assert memory.read(4) == bytes.fromhex("50ed55ba")
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.page_logs.mkdir(parents=True)
    prepare_logs(run.page_logs)
    return run


def read(run: Run, *offsets: int, watched: bool = True) -> int:
    """A process that reads the library at these offsets; its id."""
    environ = unmeasured_environ()
    if watched:
        environ |= watch_environment(environ, run.page_logs)
    command = (sys.executable, "-c", READS, str(QUICKSTART_LIBRARY), *map(str, offsets))
    process = subprocess.Popen(command, env=environ)
    assert process.wait() == 0
    return process.pid


def pages_of(run: Run, *pids: int) -> LibraryUsage:
    """What ``with_pages`` adds to a library that these processes had mapped."""
    [library] = with_pages(usage_by(*pids), run).libraries
    return library


def usage_by(*pids: int) -> Usage:
    path = str(QUICKSTART_LIBRARY.resolve())
    state = state_of(path)
    assert state is not None
    library = TracedLibrary(path=path, sha256="a" * 64, **asdict(state))
    numbers = tuple(range(len(pids)))
    usage = usage_of(LibraryUsage(library=library, images=(), processes=numbers))
    return replace(usage, processes=tuple(replace(PROCESS, header=header(pid)) for pid in pids))


def page(offset: int) -> Span:
    start = offset - offset % PAGE_SIZE
    return Span(start, start + PAGE_SIZE)


def test_pages_that_were_read_and_that_were_watched_in_vain(run: Run) -> None:
    first, second = read(run, 18288), read(run, 72856)
    found = pages_of(run, first, second)
    assert found.touched == (page(18288), page(72856))
    assert found.untouched == (Span(20480, 69632), Span(73728, SECTION.end))
    # CPU code is watched beside it, and is none of it.
    for process in read_page_logs(run.page_logs):
        assert len(process.gpu_code) == 1 < len(process.libraries)


# As cuFFT has it: other data, and then regions, in one section of large data.
@needs_compiler
@pytest.mark.parametrize(("before", "watched"), [(6060, True), (1 << 20, False)])
def test_large_data_that_begins_with_gpu_code(run: Run, before: int, *, watched: bool) -> None:
    source, library = run.folder / "large.S", run.folder / "large.so"
    source.write_text(
        '.section .ldata, "aw", @progbits\n.balign 4096\n'
        f".fill {before // 4}, 4, 7\n.long 0xBA55ED50\n.fill 16384, 4, 7\n"
        '.section .note.GNU-stack, "", @progbits\n'
    )
    subprocess.run(["cc", "-shared", "-nostdlib", "-o", library, source], check=True)
    environ = unmeasured_environ()
    environ |= watch_environment(environ, run.page_logs)
    load = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(library)]
    subprocess.run(load, env=environ, check=True)
    found = [one for process in read_page_logs(run.page_logs) for one in process.gpu_code]
    assert [bool(one.ranges) for one in found] == [True] * watched


def test_a_process_without_a_log_watched_nothing(run: Run) -> None:
    first, second = read(run, 18288), read(run, watched=False)
    assert pages_of(run, first).untouched
    found = pages_of(run, first, second)
    assert found.touched == (page(18288),) and found.untouched == ()
    # Another program with the same id had none, either.
    assert pages_of(run, first, first).untouched == ()


def test_lost_records_leave_no_witness(run: Run) -> None:
    first = read(run)
    (run.page_logs / LOST_NAME).write_bytes((1).to_bytes(4096, "little"))
    assert pages_of(run, first).untouched == ()


def test_combined_runs_keep_what_any_of_them_touched(run: Run, tmp_path: Path) -> None:
    usage = usage_by(7)
    write_record(run.usage_file, with_pages(usage, run))
    touching = Run(tmp_path / "touching")
    [library] = usage.libraries
    touched = replace(library, touched=(page(18288),))
    touching.folder.mkdir()
    write_record(touching.usage_file, replace(usage, libraries=(touched,)))
    untraced = Run(tmp_path / "untraced")
    [found] = with_pages_of(usage, (run, touching, untraced)).libraries
    assert found.touched == (page(18288),) and found.untouched == ()


WRITES = """
import ctypes, os, socket, sys
base = ctypes.c_size_t.from_address(ctypes.CDLL(sys.argv[1])._handle).value
code = (ctypes.c_char * 65536).from_address(base + 16384)
parts = [memoryview(code)[i * 8192 :][:4096] for i in range(8)]
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
pair = socket.socketpair()
with open(sys.argv[2], "wb", 0) as file:
    assert os.write(file.fileno(), parts[0]) == file.write(parts[1]) == 4096
    assert os.pwrite(file.fileno(), parts[2], 8192) == 4096
    os.lseek(file.fileno(), 0, os.SEEK_END)
    assert os.writev(file.fileno(), [parts[3], parts[4]]) == 8192
    assert pair[0].send(parts[5]) == 4096
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    assert datagrams.sendto(parts[6], datagrams.getsockname()) == 4096
    stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"wb"))
    at = ctypes.c_void_p(base + 16384 + 7 * 8192)
    assert libc.fwrite(at, 1, 4096, stream) == 4096 and libc.fclose(stream) == 0
"""


def test_who_hands_code_to_a_system_call_reads_it(run: Run, tmp_path: Path) -> None:
    environ = unmeasured_environ()
    environ |= watch_environment(environ, run.page_logs)
    command = (sys.executable, "-c", WRITES, str(QUICKSTART_LIBRARY), str(tmp_path / "written"))
    process = subprocess.Popen(command, env=environ)
    assert process.wait() == 0
    starts = [16384 + i * 8192 for i in range(8)]
    assert pages_of(run, process.pid).touched == tuple(map(page, starts))
    whole = QUICKSTART_LIBRARY.read_bytes()
    expected = b"".join(whole[start : start + PAGE_SIZE] for start in (*starts[:5], starts[7]))
    assert (tmp_path / "written").read_bytes() == expected
