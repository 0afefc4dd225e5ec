"""Which constants of a library processes read, by their page tables, however they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.models.pages import HostFile
from pytest_negativa.pages.auditors import watch_environment
from pytest_negativa.pages.gather import describe, unite_logs
from pytest_negativa.pages.page_logs import count_lost, read_page_logs
from pytest_negativa.pages.page_watch import prepare_logs
from pytest_negativa.processes.redirect import redirect_environment, write_table
from tests.support.compiling import needs_compiler
from tests.support.paged import compile_constants, needs_page_watch, symbols_of
from tests.support.sessions import unmeasured_environ

pytestmark = [needs_compiler, needs_page_watch]

BLOCKS, BLOCK = 12, 256 << 10
START = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
def strings(words):
    return (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words), None)
def in_child(block, way):
    environ = strings([f"{name}={value}" for name, value in os.environ.items()])
    assert library.in_child(block, ord(way), strings(["/bin/true"]), environ)
assert library.read_block(1) == 7
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_constants(tmp_path_factory.mktemp("constants"))


def blocks_read(logs: Path, library: Path, code: str, status: int = 0) -> set[int]:
    """The blocks that the trace of a Python program has as read."""
    logs.mkdir(exist_ok=True)
    prepare_logs(logs)
    environ = unmeasured_environ()
    done = subprocess.run(
        [sys.executable, "-c", START + code, library],
        env={**environ, **watch_environment(environ, logs)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert count_lost(logs) == 0
    processes = read_page_logs(logs)
    libraries = unite_logs(one for process in processes for one in process.libraries)
    constants = unite_logs(one for process in processes for one in process.constants)
    [key] = [key for key in libraries if key.path == str(library)]
    # Addresses as offsets.
    file = HostFile(file=key, sha256="", build_id=None, segments=((0, 0, 1 << 40),))
    unread = describe(file, libraries[key], constants.get(key)).unread
    [first] = [at for at, name in symbols_of(library).items() if name == "blocks"]
    middles = {block: first + block * BLOCK + BLOCK // 2 for block in range(BLOCKS)}
    return {n for n, at in middles.items() if not any(s <= at < e for s, e in unread)}


ALL = set(range(BLOCKS))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("library.read_block(9)", {1, 9}),
        ("os._exit(0)", {1}),
        ("os.execv('/bin/true', ['true'])", {1}),
        ("os.execve('/bin/true', ['true'], os.environ)", {1}),
        # The kernel reads constants for system calls.
        ("assert library.write_of_block(3, os.pipe()[1]) == 1", {1, 3}),
        ("import threading; threading.Thread(target=library.read_block, args=[4]).start()", {1, 4}),
        ("import atexit; atexit.register(library.read_block, 5)", {1, 5}),
        ("import _ctypes; _ctypes.dlclose(library._handle)", {1}),
        (
            "import _ctypes; _ctypes.dlclose(library._handle)\n"
            "ctypes.CDLL(sys.argv[1]).read_block(8)",
            {1, 8},
        ),
        ("if os.fork() == 0: library.read_block(6)\nelse: os.wait()", {1, 6}),
        ("in_child(6, 'x'); in_child(7, 'e')", {1, 6, 7}),
        # exec fails, and the child goes on.
        ("in_child(6, 'f')", {1, 6}),
        # They share the memory of their parent, and another program has it not.
        ("in_child(6, 'v')", {1}),
        ("assert library.spawn(strings(['/bin/true']), strings(['A=b']))", {1}),
        ("import subprocess; subprocess.run('true'); os.system('true')", {1}),
        # No word of what they read.
        ("in_child(6, 'k')", ALL),
        ("in_child(6, 's')", ALL),
        ("in_child(6, 'k'); in_child(7, 'x')", ALL),
    ],
)
def test_what_processes_read(library: Path, tmp_path: Path, code: str, expected: set[int]) -> None:
    assert blocks_read(tmp_path / "logs", library, code) == expected


def in_writable(section: str) -> str:
    return f'-DSECTION="{section},\\"aw\\""'


@pytest.mark.parametrize("section", [".data", ".ldata"])
def test_data_that_the_program_may_write_to(tmp_path: Path, section: str) -> None:
    library = compile_constants(tmp_path, in_writable(section))
    code = "library.read_block(9); library.write_to_block(4)"
    assert blocks_read(tmp_path / "logs", library, code) == {1, 4, 9}


@pytest.mark.parametrize("name", [b".data.rel.ro", b".eh_frame"])
def test_data_that_the_loader_protects(tmp_path: Path, name: bytes) -> None:
    """Some linkers make unwind tables writable; these count as data."""
    library = compile_constants(tmp_path, in_writable(".data.rel.ro"), "-Wl,-z,relro")
    at = library.read_bytes().rindex(b".data.rel.ro\0")
    with library.open("r+b") as file:
        file.seek(at)
        file.write(name + b"\0")
    assert blocks_read(tmp_path / "logs", library, "library.read_block(9)") == {1, 9}


def test_a_process_that_a_signal_ends_keeps_all(library: Path, tmp_path: Path) -> None:
    assert blocks_read(tmp_path / "logs", library, "os.kill(os.getpid(), 9)", -9) == ALL


def test_processes_of_a_run_are_united(library: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    assert blocks_read(logs, library, "library.read_block(2)") == {1, 2}
    assert blocks_read(logs, library, "library.read_block(7)") == {1, 2, 7}
    assert blocks_read(logs, library, "os.abort()", -6) == ALL


def test_a_failed_exec_says_why_beside_another_auditor(tmp_path: Path) -> None:
    """Each auditor has a libc of its own, and an errno."""
    prepare_logs(tmp_path)
    table = tmp_path / "table"
    write_table(table, tmp_path, ())
    environ = unmeasured_environ()
    environ |= redirect_environment(environ, table, tmp_path)
    environ |= watch_environment(environ, tmp_path)
    code = "import subprocess; subprocess.run(['/nowhere'])"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'" in done.stderr


def test_without_a_page_table_all_count_as_read(library: Path, tmp_path: Path) -> None:
    """As where /proc is not mounted, at the end."""
    code = "os.chroot(os.path.dirname(sys.argv[1]))"
    if os.geteuid() != 0:
        pytest.skip("needs chroot")
    assert blocks_read(tmp_path / "logs", library, code) == ALL
