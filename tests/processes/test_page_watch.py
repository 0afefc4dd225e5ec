"""The pages that real processes touch, with libraries and programs compiled here."""

from __future__ import annotations

import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.hostcode.page_logs import (
    LoggedLibrary,
    LoggedProcess,
    PageLogError,
    count_lost,
    encode_allowed,
    prepare_logs,
    read_page_logs,
)
from pytest_negativa.hostcode.usage import FileKey, identify
from pytest_negativa.models.hostcode import HostFile
from pytest_negativa.processes.page_watch import watch_environment
from tests.support.compiling import compile_shared, needs_compiler
from tests.support.paged import (
    FUNCTIONS,
    compile_paged,
    compile_program,
    needs_page_watch,
    symbols_of,
)
from tests.support.sessions import unmeasured_environ

pytestmark = [needs_compiler, needs_page_watch]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_paged(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(tmp_path_factory.mktemp("pages"))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    prepare_logs(folder)
    return folder


def run(logs: Path, *command: str | Path, **more: str) -> str:
    environ = unmeasured_environ()
    done = subprocess.run(
        [*map(str, command)],
        env={**environ, **watch_environment(environ, logs), **more},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def find(processes: tuple[LoggedProcess, ...], library: Path) -> LoggedLibrary:
    """The one record of a library."""
    (found,) = (one for p in processes for one in p.libraries if one.path == str(library))
    return found


def test_pages_of_threads_children_handlers_constructor_and_exit(
    library: Path, program: Path, logs: Path
) -> None:
    run(logs, program, library)
    found = find(read_page_logs(logs), library)
    status = library.stat()
    assert (found.device, found.inode, found.size) == (
        status.st_dev,
        status.st_ino,
        status.st_size,
    )
    assert (found.mtime_ns, found.watched) == (status.st_mtime_ns, True)
    names = symbols_of(library)
    assert {names[page] for page in found.pages if page in names} == FUNCTIONS
    assert count_lost(logs) == 0


def test_a_program_behaves_the_same_without_us(library: Path, program: Path) -> None:
    assert subprocess.run([program, library]).returncode == 0


def test_exceptions_through_unwind_tables_that_come_page_by_page(
    tmp_path: Path, logs: Path
) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path / "libthrowing.so"
    source = Path(__file__).parents[1] / "support/sources/pages/throwing.cpp"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-pthread"], check=True)
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).catch_many(1000))"
    assert run(logs, sys.executable, "-c", code) == "1000\n"
    (process,) = read_page_logs(logs)
    paths = {Path(one.path).name for one in process.libraries}
    assert "libthrowing.so" in paths and any(name.startswith("libstdc++") for name in paths)


def test_faulthandler_still_reports_a_crash(logs: Path) -> None:
    environ = unmeasured_environ()
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", "import ssl, ctypes; ctypes.string_at(8)"],
        env={**environ, **watch_environment(environ, logs)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -11
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "string_at" in done.stderr


def test_a_library_that_is_closed_and_loaded_again(library: Path, logs: Path) -> None:
    code = f"""
import _ctypes, ctypes
for name in ("in_main", "in_thread"):
    handle = _ctypes.dlopen({str(library)!r}, 2)
    ctypes.CFUNCTYPE(None)(_ctypes.dlsym(handle, name))()
    _ctypes.dlclose(handle)
"""
    run(logs, sys.executable, "-c", code)
    (process,) = read_page_logs(logs)
    names = symbols_of(library)
    found = [one for one in process.libraries if one.path == str(library)]
    assert [{names[page] for page in one.pages if page in names} for one in found] == [
        {"in_constructor", "in_main"},
        {"in_constructor", "in_thread"},
    ]


def test_a_library_whose_addresses_do_not_begin_at_zero(tmp_path: Path, logs: Path) -> None:
    # As prelink(8) leaves them: nothing is mapped where the loader's base address points.
    target = tmp_path / "libbased.so"
    based = compile_shared("pages/library.c", target, "-Wl,-Ttext-segment=0x40000000")
    run(logs, sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(based)!r}).in_main()")
    found = find(read_page_logs(logs), based)
    assert found.watched
    names = symbols_of(based)
    assert {names[page] for page in found.pages if page in names} == {"in_constructor", "in_main"}


def test_code_that_a_program_makes_accessible_counts_as_touched(library: Path, logs: Path) -> None:
    address = next(at for at, name in symbols_of(library).items() if name == "never")
    code = f"""
import ctypes
library = ctypes.CDLL({str(library)!r})
at = ctypes.cast(library.never, ctypes.c_void_p).value
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), 4096, 5) == 0
library.never()
"""
    run(logs, sys.executable, "-c", code)
    assert address in find(read_page_logs(logs), library).pages


def test_a_process_with_few_mappings_left_counts_whole_blocks(
    tmp_path: Path, library: Path, logs: Path
) -> None:
    # Never wrong: what is not watched any more counts as touched.
    forced = compile_shared(
        "../../../pytest_negativa/processes/pages.c",
        tmp_path / "forced.so",
        "-DMAX_FAULTS=3",
        "-Wno-error",
        "-Wl,-z,now",
    )
    environ = unmeasured_environ()
    environ = {**environ, **watch_environment(environ, logs), "LD_AUDIT": str(forced)}
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).in_main()"
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    found = find(read_page_logs(logs), library)
    assert len(found.pages) == sum(end - start for start, end in found.ranges) // 4096


def test_a_limit_on_file_sizes_loses_libraries_not_the_process(
    library: Path, program: Path, logs: Path
) -> None:
    environ = unmeasured_environ()
    subprocess.run(
        [program, library],
        env={**environ, **watch_environment(environ, logs)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        check=True,
    )
    assert read_page_logs(logs) == ()
    assert count_lost(logs) > 0


def test_a_damaged_log_is_an_error(library: Path, program: Path, logs: Path) -> None:
    run(logs, program, library)
    (path,) = logs.glob("*.pages")
    data = bytearray(path.read_bytes())
    data[0] ^= 4
    path.write_bytes(data)
    with pytest.raises(PageLogError, match="damaged"):
        read_page_logs(logs)


def test_a_range_that_the_record_cannot_hold_is_an_error(tmp_path: Path) -> None:
    process = struct.pack("<6IQQq2I", 56, 1, 0, 0, 0, 0, 1, 0, 0, 0, 56)
    library = struct.pack("<6IQQq2I2Q", 72, 2, 0, 0, 0, 1, 1, 1, 1, 0, 72, 0, 1 << 62)
    (tmp_path / "1.pages").write_bytes(process + library + bytes(64 << 10))
    with pytest.raises(PageLogError, match="damaged"):
        read_page_logs(tmp_path)


@pytest.mark.slow
def test_no_undefined_behaviour(tmp_path: Path, library: Path, program: Path, logs: Path) -> None:
    checked = compile_shared(
        "../../../pytest_negativa/processes/pages.c",
        tmp_path / "checked.so",
        *("-O1", "-Wl,-z,now", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"),
    )
    run(logs, program, library, LD_AUDIT=str(checked))
    found = find(read_page_logs(logs), library)
    allowed = tmp_path / "allowed"
    file = identify(FileKey(found.path, found.device, found.inode, found.size, found.mtime_ns))
    assert isinstance(file, HostFile)
    allowed.write_bytes(encode_allowed(file, found.ranges, found.pages))
    more = {"LD_AUDIT": str(checked), "NEGATIVA_PAGES_ALLOWED": str(allowed)}
    run(logs, program, library, **more)


@pytest.mark.parametrize(("offset", "value"), [(0, 64), (52, 0xFFFF_FFF0), (52, 1 << 20)])
def test_bits_that_a_record_cannot_hold_forbid_nothing(
    tmp_path: Path, library: Path, logs: Path, offset: int, value: int
) -> None:
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).in_main()"
    run(logs, sys.executable, "-c", code)
    traced = find(read_page_logs(logs), library)
    file = identify(
        FileKey(str(library), traced.device, traced.inode, traced.size, traced.mtime_ns)
    )
    assert isinstance(file, HostFile)
    rows = bytearray(encode_allowed(file, traced.ranges, traced.pages))
    struct.pack_into("<I", rows, offset, value)
    (tmp_path / "allowed").write_bytes(rows)
    rerun = tmp_path / "rerun"
    rerun.mkdir()
    prepare_logs(rerun)
    environ = watch_environment(unmeasured_environ(), rerun, tmp_path / "allowed")
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    assert not find(read_page_logs(rerun), library).restricted


def test_a_forbidden_page_is_the_programs_own_fault(
    tmp_path: Path, library: Path, logs: Path
) -> None:
    code = f"import ctypes, sys; getattr(ctypes.CDLL({str(library)!r}), sys.argv[1])()"
    run(logs, sys.executable, "-c", code, "in_main")
    traced = find(read_page_logs(logs), library)
    allowed = tmp_path / "allowed"
    file = identify(
        FileKey(str(library), traced.device, traced.inode, traced.size, traced.mtime_ns)
    )
    assert isinstance(file, HostFile)
    allowed.write_bytes(encode_allowed(file, traced.ranges, traced.pages))
    environ = unmeasured_environ()
    for function, status in (("in_main", 0), ("in_thread", -11)):
        rerun = tmp_path / function
        rerun.mkdir()
        prepare_logs(rerun)
        environ |= watch_environment(environ, rerun, allowed)
        done = subprocess.run([sys.executable, "-c", code, function], env=environ)
        assert done.returncode == status
        found = find(read_page_logs(rerun), library)
        assert found.restricted
        missed = {symbols_of(library)[page] for page in set(found.pages) - set(traced.pages)}
        assert missed == ({function} if status else set())
