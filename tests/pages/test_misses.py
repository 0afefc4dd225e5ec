"""Logs of what comes back to libraries with a spare, by real processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.errors import NegativaError, OptionError, StoreError
from pytest_negativa.pages.misses import Miss, Misses
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.rewriting.compact.records import Cut
from tests.support.compiling import compile_c
from tests.support.cutting import Kit, logged, may_mount, needs_stub
from tests.support.faults import PlantedFault
from tests.support.page_logs import encode_misses

pytestmark = needs_stub

UNLOGGED = "no log of what comes back to libraries can be written here"

# Arguments: the library, a folder of logs, and what to do with the logs.
SPOILS = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
first = library.sum(100, 101)
for log in os.scandir(sys.argv[2]):
    os.truncate(log, int(sys.argv[3]))
print(first + library.sum(101, 102), ctypes.CDLL(sys.argv[4]).sum(1, 2))
"""


def test_the_log_counts_pages(kit: Kit, tmp_path: Path) -> None:
    cut = kit.cut(tmp_path / "cut")
    kit = dataclasses.replace(kit, pages=kit.pages // 2)
    logs = tmp_path / "logs"
    for _ in range(2):
        assert kit.run("plain", cut.library, environ=logged(logs)).stdout
    [misses] = read_misses([logs])
    assert (misses.name, misses.original_size) == (cut.library.name, cut.size_before)
    assert misses.original.hex() == cut.original_sha256
    # Each of the two processes touched each page of code.
    counts = [miss.times for miss in misses.pages.values()]
    assert counts.count(2) >= kit.pages and set(counts) == {2}
    functions = [miss for miss in misses.pages.values() if miss.fetched and miss.first % 4096 == 0]
    assert len(functions) >= kit.pages - 1
    # The log is the next trace: what it names stays, and nothing is missed any more.
    again = kit.cut(tmp_path / "again", misses.ranges())
    assert kit.run("plain", again.library, environ=logged(tmp_path / "new")).stdout
    [nothing] = read_misses([tmp_path / "new"])
    assert not nothing.pages


def test_all_pages_come_back_before_a_program_seals_them(
    kit: Kit, cut: Cut, tmp_path: Path
) -> None:
    done = kit.run("sealed", cut.library, environ=logged(tmp_path))
    if "no seal" in done.stdout:
        pytest.skip("this kernel seals no memory")
    assert (done.returncode, done.stdout) == (0, kit.output)
    [misses] = read_misses([tmp_path])
    assert len(misses.pages) >= kit.pages


def test_a_log_maps_little_memory(cut: Cut, tmp_path: Path) -> None:
    """All of it counts for a program that locks its memory (mlockall, RLIMIT_MEMLOCK)."""
    code = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize:")))
"""
    command = [sys.executable, "-I", "-S", "-c", code, str(cut.library)]
    plain, with_log = (
        int(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)
        for environ in ({}, logged(tmp_path))
    )
    assert 0 < with_log - plain < 3000  # kB; most of it is the tracer's own libc


def test_a_child_shares_the_log_of_its_parent(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    code = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
if os.fork() == 0:
    os._exit(library.sum(150, 151) != 157)
print(os.wait()[1], library.sum(150, 151))
"""
    command = [sys.executable, "-I", "-c", code, str(cut.library)]
    done = subprocess.run(
        command, env=logged(tmp_path / "logs"), capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("0 157\n", "")
    [misses] = read_misses([tmp_path / "logs"])
    assert {miss.times for miss in misses.pages.values()} == {1}


@pytest.mark.parametrize(
    ("size", "problem"), [(0, "somebody truncated the file"), (8192, "or a damaged one")]
)
def test_a_log_is_truncated(kit: Kit, cut: Cut, tmp_path: Path, size: int, problem: str) -> None:
    """The process goes on, also with the next library."""
    other = kit.cut(tmp_path / "other", [(0, 8192)])
    logs = tmp_path / "logs"
    words = [str(cut.library), str(logs), str(size), str(other.library)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", SPOILS, *words],
        env=logged(logs), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "215 8\n")
    assert UNLOGGED in done.stderr or size > 0
    with pytest.raises(NegativaError, match=problem):
        read_misses([logs])


def test_a_limit_on_file_sizes_kills_nobody(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    command = f'ulimit -f 0; exec "{kit.program}" plain "{cut.library}" {kit.pages}'
    environ = logged(tmp_path)
    done = subprocess.run(["sh", "-c", command], env=environ, capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode()) == (0, kit.output)
    assert f"negativa: {tmp_path}: {UNLOGGED}" in done.stderr.decode()


def test_a_message_goes_to_no_file_of_the_program(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    """Descriptor 2 may be one by now."""
    code = """
import ctypes, os, sys
if len(sys.argv) > 2:
    os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), 2)
print(ctypes.CDLL(sys.argv[1]).sum(100, 101))
"""
    command = [sys.executable, "-I", "-c", code, str(cut.library)]
    for path in ([], [str(tmp_path / "data")]):
        errors = tmp_path / "errors"
        with errors.open("w") as file:
            done = subprocess.run(
                [*command, *path], env=logged("/dev/full"), stdout=subprocess.PIPE, stderr=file,
                check=True,
            )  # fmt: skip
        assert done.stdout == b"107\n"
        assert errors.read_text().count(UNLOGGED) == (not path)
    assert (tmp_path / "data").read_bytes() == b""


@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_a_program_with_a_sanitizer(kit: Kit, cut: Cut, tmp_path: Path, sanitizer: str) -> None:
    """It keeps libc's functions for signals as it finds them when it begins."""
    flags = (f"-fsanitize={sanitizer}", "-Wl,--no-as-needed", "-lstdc++")
    try:
        program = compile_c("spare/program.c", tmp_path / "program", *flags)
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no such sanitizer")
    with_it = dataclasses.replace(kit, program=program)
    # Not "threads": a child forked beside throwing threads may inherit GCC 12's allocator lock.
    for what in ("plain", "blocked", "handler-before", "handler-after"):
        expected = with_it.run(what, kit.library)
        done = with_it.run(what, cut.library, environ=logged(tmp_path / "logs"))
        assert (done.returncode, done.stdout) == (0, expected.stdout)


@pytest.mark.parametrize("what", ["plain", "pending"])
def test_a_message_that_nobody_reads(kit: Kit, cut: Cut, what: str) -> None:
    """The program goes on. A SIGPIPE that was pending before the message stays pending."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        command = [str(kit.program), what, str(cut.library), str(kit.pages)]
        environ = logged("/dev/full")
        done = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, stderr=pipe, text=True, check=False
        )
    assert (done.returncode, done.stdout) == (0, kit.output)


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs to mount file systems")
@pytest.mark.planted_fault(
    "The log of what comes back can't be written: the disk is full",
    says="no log of what comes back",
)
def test_a_full_disk_kills_nobody(kit: Kit, cut: Cut, tmp_path: Path, fault: PlantedFault) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    variables = " ".join(f"{name}='{value}'" for name, value in logged(mount / "logs").items())
    script = (
        f"mount -t tmpfs -o size=64k tmpfs '{mount}' && "
        f"{{ head -c 1M /dev/zero > '{mount}/full' || true; }} 2>/dev/null; "
        f"{variables} '{kit.program}' plain '{cut.library}' {kit.pages}"
    )
    command = ["unshare", "-m", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, kit.output)
    assert done.stderr.count("negativa:") == 1
    fault.check(done.stderr)


def test_logs_of_one_original_are_added_up(tmp_path: Path) -> None:
    """Those of other machines, and of other cuts of the same library."""
    one = Misses("lib.so", b"o" * 32, 20479, {0: Miss(1, 7, False), 1: Miss(0, 4096, False),
                                              3: Miss(1, 3 * 4096, True)})  # fmt: skip
    other = Misses("lib.so", b"o" * 32, 20479, {0: Miss(1, 9, True), 1: Miss(1, 5000, False)})
    third = Misses("a.so", b"p" * 32, 4096, {0: Miss(1, 0, False)})
    (tmp_path / "a.pages").write_bytes(encode_misses(1, [one, third]))
    (tmp_path / "b.pages").write_bytes(encode_misses(2, [other]))
    (tmp_path / "other").write_bytes(b"")
    assert read_misses([tmp_path / "a.pages"]) == [third, one]
    _, both = read_misses([tmp_path])
    assert both.pages == {0: Miss(2, 7, False), 1: Miss(1, 5000, False), 3: Miss(1, 3 * 4096, True)}
    assert both.ranges() == ((0, 8192), (3 * 4096, 4 * 4096))
    with pytest.raises(OptionError, match="no such file or folder; see"):
        read_misses([tmp_path / "missing"])


@pytest.mark.parametrize("end", [60, 80, 100, 150, 4096])
def test_a_damaged_log(tmp_path: Path, end: int) -> None:
    data = encode_misses(1, [Misses("lib.so", b"o" * 32, 8192, {1: Miss(1, 5000, False)})])
    path = tmp_path / "a.pages"
    path.write_bytes(data[:end])
    with pytest.raises(NegativaError, match="a damaged one"):
        read_misses([path])


def test_a_pipe_or_link_in_the_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("log")
    (tmp_path / "log").write_bytes(encode_misses(1, []))
    for name in ("pipe", "link"):
        with pytest.raises(StoreError, match="cannot be read"):
            read_misses([tmp_path / name])
