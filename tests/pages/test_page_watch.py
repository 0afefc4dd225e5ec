"""The pages that real processes touch, with libraries and programs compiled here."""

from __future__ import annotations

import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.errors import NegativaError
from pytest_negativa.pages.auditors import watch_environment
from pytest_negativa.pages.page_logs import (
    LoggedLibrary,
    LoggedProcess,
    count_lost,
    read_page_logs,
    unwatched_programs,
)
from pytest_negativa.pages.page_watch import prepare_logs
from tests.support.compiling import compile_c, compile_shared, needs_compiler
from tests.support.cutting import PAGES as PAGES_OF_LIBRARY
from tests.support.cutting import compile_library
from tests.support.paged import (
    FUNCTIONS,
    compile_paged,
    compile_program,
    needs_page_watch,
    symbols_of,
)
from tests.support.sessions import unmeasured_environ

pytestmark = [needs_compiler, needs_page_watch]
PAGES = "../../../pytest_negativa/pages/watch.c"  # the watcher, as compile_shared finds it


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_paged(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(tmp_path_factory.mktemp("pages"))


# As on a kernel without guard pages for files.
WITHOUT_GUARDS = ("-DGUARD_INSTALL=-1", "-Wno-error", "-Wl,-z,now")


@pytest.fixture(scope="module", params=["guards", "mprotect"])
def watcher(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Variables for a process that is watched in each of two ways."""
    if request.param == "guards":
        if not has_file_guards():
            pytest.skip("needs guard pages for files (Linux 6.15)")
        return {}
    made = tmp_path_factory.mktemp("watcher") / "mprotect.so"
    return {"LD_AUDIT": str(compile_shared(PAGES, made, *WITHOUT_GUARDS))}


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


def die(logs: Path, *command: str | Path, **more: str) -> int:
    """The status of a program that a signal ends."""
    environ = unmeasured_environ()
    environ = {**environ, **watch_environment(environ, logs), **more}
    return subprocess.run([*map(str, command)], env=environ).returncode


def find(processes: tuple[LoggedProcess, ...], library: Path) -> LoggedLibrary:
    """The one record of a library."""
    (found,) = (one for p in processes for one in p.libraries if one.file.path == str(library))
    return found


def test_pages_of_threads_children_handlers_constructor_and_exit(
    library: Path, program: Path, logs: Path, watcher: dict[str, str]
) -> None:
    run(logs, program, library, **watcher)
    found = find(read_page_logs(logs), library)
    status = library.stat()
    assert found.file[1:4] == (
        status.st_dev,
        status.st_ino,
        status.st_size,
    )
    assert (found.file.mtime_ns, found.watched) == (status.st_mtime_ns, True)
    names = symbols_of(library)
    assert {names[page] for page in found.pages if page in names} == FUNCTIONS
    assert count_lost(logs) == 0


def test_a_program_behaves_the_same_without_us(library: Path, program: Path) -> None:
    assert subprocess.run([program, library]).returncode == 0


def test_exceptions_through_unwind_tables_that_come_page_by_page(
    tmp_path: Path, logs: Path, watcher: dict[str, str]
) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path / "libthrowing.so"
    source = Path(__file__).parents[1] / "support/sources/pages/throwing.cpp"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-pthread"], check=True)
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).catch_many(1000))"
    assert run(logs, sys.executable, "-c", code, **watcher) == "1000\n"
    (process,) = read_page_logs(logs)
    paths = {Path(one.file.path).name for one in process.libraries}
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
    found = [one for one in process.libraries if one.file.path == str(library)]
    assert [{names[page] for page in one.pages if page in names} for one in found] == [
        {"in_constructor", "in_main"},
        {"in_constructor", "in_thread"},
    ]


def test_libraries_that_are_closed_leave_their_places_to_others(
    tmp_path: Path, library: Path, logs: Path
) -> None:
    small = compile_shared(
        "../../../pytest_negativa/pages/watch.c",
        tmp_path / "small.so",
        "-DMAX_LIBRARIES=40",
        "-Wl,-z,now",
    )
    environ = unmeasured_environ()
    environ = {**environ, **watch_environment(environ, logs), "LD_AUDIT": str(small)}
    kept = shutil.copy(library, tmp_path / "kept.so")
    code = f"""
import _ctypes, ctypes
kept = ctypes.CDLL({str(kept)!r})
for _ in range(100):
    handle = _ctypes.dlopen({str(library)!r}, 2)
    ctypes.CFUNCTYPE(None)(_ctypes.dlsym(handle, "in_main"))()
    _ctypes.dlclose(handle)
kept.in_thread()
"""
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    assert count_lost(logs) == 0
    (process,) = read_page_logs(logs)
    names = symbols_of(library)
    found = [
        {names[page] for page in one.pages if page in names}
        for one in process.libraries
        if one.file.path in (str(library), str(kept))
    ]
    assert found == [{"in_constructor", "in_thread"}, *[{"in_constructor", "in_main"}] * 100]


def test_a_library_whose_addresses_do_not_begin_at_zero(tmp_path: Path, logs: Path) -> None:
    # As prelink(8) leaves them: nothing is mapped where the loader's base address points.
    target = tmp_path / "libbased.so"
    based = compile_shared("pages/library.c", target, "-Wl,-Ttext-segment=0x40000000")
    run(logs, sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(based)!r}).in_main()")
    found = find(read_page_logs(logs), based)
    assert found.watched
    names = symbols_of(based)
    assert {names[page] for page in found.pages if page in names} == {"in_constructor", "in_main"}


FINDS_NEVER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
at = ctypes.cast(library.never, ctypes.c_void_p).value
libc = ctypes.CDLL(None)
"""


def test_code_with_restartable_sequences_is_not_watched(tmp_path: Path, logs: Path) -> None:
    """The kernel reads it without a signal, and kills a process if it can't."""
    library = compile_library(tmp_path, "-DRESTARTABLE")
    program = compile_c("spare/program.c", tmp_path / "program")
    assert run(logs, program, "restartable", library, str(PAGES_OF_LIBRARY)).count("\n") == 2
    assert not find(read_page_logs(logs), library).watched


def test_code_that_a_program_makes_accessible_counts_as_touched(
    library: Path, logs: Path, watcher: dict[str, str]
) -> None:
    address = next(at for at, name in symbols_of(library).items() if name == "never")
    code = f"""{FINDS_NEVER}
assert libc.mprotect(ctypes.c_void_p(at), 4096, 5) == 0
library.never()
"""
    run(logs, sys.executable, "-c", code, library, **watcher)
    assert address in find(read_page_logs(logs), library).pages


def test_code_that_a_program_writes_is_its_own(
    library: Path, logs: Path, watcher: dict[str, str]
) -> None:
    address = next(at for at, name in symbols_of(library).items() if name == "never")
    code = f"""{FINDS_NEVER}
if sys.argv[2] == "libc":
    assert libc.mprotect(ctypes.c_void_p(at), 4096, 7) == 0
else:
    assert libc.syscall(10, ctypes.c_void_p(at), ctypes.c_long(4096), ctypes.c_long(7)) == 0
ctypes.memmove(at, bytes.fromhex("b82a000000c3"), 6)  # mov eax, 42; ret
assert library.never() == 42
"""
    run(logs, sys.executable, "-c", code, library, "libc", **watcher)
    assert address in find(read_page_logs(logs), library).pages
    run(logs, sys.executable, "-c", code, library, "system call", **watcher)


def test_a_write_to_code_is_the_programs_own_fault(
    library: Path, logs: Path, watcher: dict[str, str]
) -> None:
    code = f"{FINDS_NEVER}ctypes.memset(at, 0, 1)"
    assert die(logs, sys.executable, "-c", code, library, **watcher) == -11


def test_a_hole_in_the_code_is_the_programs_own_fault(
    library: Path, logs: Path, watcher: dict[str, str]
) -> None:
    code = f"{FINDS_NEVER}assert libc.munmap(ctypes.c_void_p(at), 4096) == 0; library.never()"
    assert die(logs, sys.executable, "-c", code, library, **watcher) == -11
    names = symbols_of(library)
    pages = find(read_page_logs(logs), library).pages
    assert "in_main" not in {names.get(page) for page in pages}


# The filter of a sandbox: of madvise(2), which is call 28, it allows MADV_DONTNEED and MADV_FREE.
SANDBOX = """
import ctypes, struct, sys
row = struct.Struct("<HBBI")
rows = [(0x20, 0, 0, 0), (0x15, 0, 4, 28), (0x20, 0, 0, 32), (0x15, 2, 0, 4), (0x15, 1, 0, 8)]
rows += [(0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
filter = ctypes.create_string_buffer(b"".join(row.pack(*one) for one in rows))
program = ctypes.create_string_buffer(
    struct.pack("<HxxxxxxQ", len(rows), ctypes.addressof(filter))
)
library = ctypes.CDLL(sys.argv[1])
library.in_main()
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP
assert libc.madvise(None, ctypes.c_long(4096), 103) == -1
library.in_main()
library.in_thread()
"""


def test_a_filter_that_forbids_to_remove_guards(
    library: Path, logs: Path, watcher: dict[str, str]
) -> None:
    run(logs, sys.executable, "-c", SANDBOX, library, **watcher)
    names = symbols_of(library)
    pages = find(read_page_logs(logs), library).pages
    called = {names[page] for page in pages if page in names}
    assert {"in_main", "in_thread"} <= called and "never" not in called


def test_what_runs_after_a_librarys_end(
    tmp_path: Path, logs: Path, watcher: dict[str, str]
) -> None:
    """A destructor calls a library that was closed before: the loader unmaps nothing at the end."""
    sources = {
        "last": """#include <stddef.h>
            static void (*callback)(void);
            void at_end(void (*function)(void)) { callback = function; }
            __attribute__((destructor)) static void end(void) { if (callback) callback(); }""",
        "first": """#include <unistd.h>
            void at_end(void (*function)(void));
            void late(void);
            __attribute__((constructor)) static void begin(void) { at_end(late); }
            __attribute__((aligned(4096))) int in_main(void) { return 42; }
            __attribute__((aligned(4096))) void late(void) { write(1, "late\\n", 5); }
            __attribute__((aligned(4096))) void never(void) { write(1, "never\\n", 6); }""",
    }
    made = {name: tmp_path / f"lib{name}.so" for name in sources}
    for name, text in sources.items():
        (tmp_path / f"{name}.c").write_text(text)
        linked = [] if name == "last" else [str(made["last"]), f"-Wl,-rpath,{tmp_path}"]
        compile_shared(str(tmp_path / f"{name}.c"), made[name], *linked)
    program = tmp_path / "program"
    (tmp_path / "main.c").write_text("int in_main(void); int main(void) { return in_main() - 42; }")
    linked = [str(made["first"]), f"-Wl,-rpath,{tmp_path}", f"-Wl,-rpath-link,{tmp_path}"]
    compile_c(str(tmp_path / "main.c"), program, *linked)
    assert run(logs, program, **watcher) == "late\n"
    names = symbols_of(made["first"])
    called = {names.get(page) for page in find(read_page_logs(logs), made["first"]).pages}
    assert "late" in called and "never" not in called


def has_file_guards() -> bool:
    """Whether the kernel has guard pages for files (Linux 6.15)."""
    import mmap

    with (
        open(sys.executable, "rb") as file,
        mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory,
    ):
        try:
            memory.madvise(102)  # MADV_GUARD_INSTALL
        except OSError:
            return False
    return True


def compile_many(folder: Path) -> Path:
    """A library with 300 functions, ``touch0`` and so on, each on a page of its own."""
    source = folder / "many.c"
    source.write_text(
        "".join(
            f"__attribute__((aligned(8192))) int touch{i}(void) {{ return {i}; }}\n"
            for i in range(300)
        )
    )
    return compile_shared(str(source), folder / "libmany.so")


def test_guarded_pages_take_no_mappings(tmp_path: Path, logs: Path) -> None:
    if not has_file_guards():
        pytest.skip("needs guard pages for files (Linux 6.15)")
    library = compile_many(tmp_path)
    code = f"""
import ctypes
library = ctypes.CDLL({str(library)!r})
assert all(library[f"touch{{i}}"]() == i for i in range(300))
print(sum("libmany" in line for line in open("/proc/self/maps")))
"""
    assert int(run(logs, sys.executable, "-c", code)) < 10
    assert len(find(read_page_logs(logs), library).pages) == 300


def watch_with_few_mappings(tmp_path: Path, most: int) -> Path:
    """The watcher, which adds about so many mappings, and opens whole blocks then."""
    return compile_shared(PAGES, tmp_path / "few.so", f"-DMAX_PARTS={most}", *WITHOUT_GUARDS)


def test_a_process_with_few_mappings_left_counts_whole_blocks(
    tmp_path: Path, library: Path, logs: Path
) -> None:
    # Never wrong: what is not watched any more counts as touched.
    forced = watch_with_few_mappings(tmp_path, 6)
    environ = unmeasured_environ()
    environ = {**environ, **watch_environment(environ, logs), "LD_AUDIT": str(forced)}
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).in_main()"
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    found = find(read_page_logs(logs), library)
    assert len(found.pages) == sum(end - start for start, end in found.ranges) // 4096


def test_pages_side_by_side_are_one_mapping(
    tmp_path: Path, library: Path, program: Path, logs: Path
) -> None:
    forced = watch_with_few_mappings(tmp_path, 10)
    run(logs, program, library, LD_AUDIT=str(forced))
    names = symbols_of(library)
    # Eight pages; each would be two mappings more if it were alone.
    pages = find(read_page_logs(logs), library).pages
    assert {names[page] for page in pages if page in names} == FUNCTIONS


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


STARTS = """
import os, subprocess, sys
python, code, few = sys.executable, "pass", {"PATH": os.environ["PATH"]}
audit = {"LD_AUDIT": os.environ["LD_AUDIT"]}
subprocess.run([python, "-c", code, "inherits"])
subprocess.run([python, "-c", code, "keeps"], env={**audit, "NEGATIVA_PAGES_LOGS": "/"})
subprocess.run([python, "-c", code, "lacks LD_AUDIT"], env={"NEGATIVA_PAGES_LOGS": "/"})
subprocess.run([python, "-c", code, "few"], env=few)
subprocess.run([python, "-c", code, "few"], env=few)
subprocess.run([sys.argv[1], "script"], env=few)
subprocess.run(["true", "loads nothing"], env=few)
subprocess.run("true; true", shell=True, env=few)
subprocess.run([python, "-c", code, "after fork"], env={}, preexec_fn=lambda: None)
os.waitpid(os.posix_spawn(python, [python, "-c", code, "spawn"], {}), 0)
os.waitpid(os.posix_spawnp(python, [python, "-c", code, "\xff" * 400], {}), 0)
try: subprocess.run(["/no/such/program"], env={})
except FileNotFoundError: pass
for number in range(int(sys.argv[2])): subprocess.run([python, "-c", code, str(number)], env={})
"""


@pytest.mark.parametrize("others", [0, 10])
def test_programs_that_are_started_without_the_watch_are_named(
    tmp_path: Path, logs: Path, others: int
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/usr/bin/env -S python3 -u\n")
    script.chmod(0o755)
    run(logs, sys.executable, "-c", STARTS, script, str(others))
    found = list(unwatched_programs(logs))
    python = f"{sys.executable} -c pass"
    assert found[:7] == [
        f"{python} lacks LD_AUDIT",
        f"{python} few",
        f"{script} script",
        # Nobody knows what a shell starts.
        "/bin/sh -c true; true",
        f"{python} after fork",
        f"{python} spawn",
        found[6],
    ]
    assert found[6].startswith(f"{python} \xff\xff") and len(found[6].encode()) < 384
    assert found[7:] == ([f"{python} 0", "9 other programs"])[: others and 2]


def test_a_damaged_log_is_an_error(library: Path, program: Path, logs: Path) -> None:
    run(logs, program, library)
    (path,) = logs.glob("*.pages")
    data = bytearray(path.read_bytes())
    data[0] ^= 4
    path.write_bytes(data)
    with pytest.raises(NegativaError, match="damaged"):
        read_page_logs(logs)


def test_a_range_that_the_record_cannot_hold_is_an_error(tmp_path: Path) -> None:
    process = struct.pack("<6IQQq2I", 56, 1, 0, 0, 0, 0, 1, 0, 0, 0, 56)
    library = struct.pack("<6IQQq2I2Q", 72, 2, 0, 0, 0, 1, 1, 1, 1, 0, 72, 0, 1 << 62)
    (tmp_path / "1.pages").write_bytes(process + library + bytes(64 << 10))
    with pytest.raises(NegativaError, match="damaged"):
        read_page_logs(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), WITHOUT_GUARDS], ids=["guards", "mprotect"])
def test_no_undefined_behaviour(
    tmp_path: Path, library: Path, program: Path, logs: Path, options: tuple[str, ...]
) -> None:
    checked = compile_shared(
        PAGES,
        tmp_path / "checked.so",
        *("-O1", "-Wl,-z,now", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"),
        *options,
    )
    run(logs, program, library, LD_AUDIT=str(checked))
    assert find(read_page_logs(logs), library).pages


def _in_pid_namespace() -> list[str]:
    command = ["unshare", "--user", "--map-root-user", "--pid", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"]).returncode != 0:
        pytest.skip("this system forbids user and pid namespaces")
    return command


def test_a_child_with_its_parents_id_has_a_log_of_its_own(
    tmp_path: Path, library: Path, logs: Path
) -> None:
    others = [shutil.copy(library, tmp_path / f"lib{name}.so") for name in ("child", "parent")]
    code = f"""
import ctypes, os
assert ctypes.CDLL(None).unshare(0x20000000) == 0
child = os.fork()
assert os.getpid() == 1
if child == 0:
    ctypes.CDLL({str(others[0])!r}).in_main()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
ctypes.CDLL({str(others[1])!r}).in_thread()
"""
    run(logs, *_in_pid_namespace(), sys.executable, "-c", code)
    processes = read_page_logs(logs)
    names = symbols_of(library)
    for other, function in zip(others, ("in_main", "in_thread"), strict=True):
        pages = find(processes, Path(other)).pages
        assert {names[page] for page in pages & names.keys()} == {"in_constructor", function}


@pytest.mark.slow
def test_a_child_with_its_parents_id_waits_for_no_thread_of_the_parent(
    tmp_path: Path, library: Path, logs: Path
) -> None:
    program = compile_c("pages/namespace.c", tmp_path / "program")
    other = shutil.copy(library, tmp_path / "other.so")
    environ = unmeasured_environ()
    environ |= watch_environment(environ, logs)
    for _ in range(30):
        command = [*_in_pid_namespace(), program, library, other]
        # If a thread of the parent held the lock, the child must not wait for it.
        assert subprocess.run(command, env=environ, timeout=60).returncode == 0
    libraries = [one for process in read_page_logs(logs) for one in process.libraries]
    touched = {page for one in libraries if one.file.path == str(library) for page in one.pages}
    assert "in_child" in {symbols_of(library).get(page) for page in touched}
