"""The code that each cut library has: bare bytes, which need nothing of the process."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import pytest_negativa.pages.note
from pytest_negativa.pages.note import STUB_SECOND, STUB_SIZE, STUB_START
from pytest_negativa.rewriting.compact.records import Cut
from tests.support.cutting import Kit, needs_stub

pytestmark = needs_stub

STUB = Path(pytest_negativa.pages.note.__file__).with_name("_stub.bin")
ENDBR64 = bytes.fromhex("f30f1efa")
# Those of the floating-point units, and the bases of thread-local storage.
FOREIGN = re.compile(r"%[xyz]?mm\d|%st\b|%k[0-7]|%[fg]s:|xsave|fxsave|[fg]sbase")
# ld.so makes them itself when it loads a library, but the last.
CALLS = {"openat", "read", "pread64", "fstat", "mmap", "mprotect", "munmap", "close", "ioctl"}


def test_where_its_functions_start() -> None:
    code = STUB.read_bytes()
    assert STUB_START < len(code) <= STUB_SIZE
    for place in (STUB_START, STUB_SECOND):
        assert code[place : place + 4] == ENDBR64


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_it_needs_no_registers_but_the_general_ones() -> None:
    """Callers may keep values in the others; nothing has set up thread-local storage."""
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64"]
    done = subprocess.run(
        [*command, f"--start-address={STUB_SECOND}", STUB],
        capture_output=True,
        text=True,
        check=True,
    )
    # Its texts lie behind the code.
    size = STUB.stat().st_size
    ends = [match.end() for match in re.finditer(r"\tret", done.stdout)]
    code = done.stdout[: ends[-1]]
    assert len(re.findall(r"\tsyscall", code)) >= 1
    assert FOREIGN.search(code) is None
    targets = re.findall(r"\t(?:call|j[a-z]+) +0x([0-9a-f]+)", code)
    assert len(targets) > 50
    assert all(STUB_SECOND <= int(target, 16) < size for target in targets)
    # None through memory or a register: there is no table of functions.
    assert re.search(r"\t(?:call|jmp) +\*", code) is None


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_it_calls_the_kernel_as_the_loader_does(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    calls = []
    for library in (kit.library, cut.library):
        trace = tmp_path / "trace"
        done = subprocess.run(
            ["strace", "-o", trace, kit.program, "plain", library, str(kit.pages)],
            capture_output=True,
            check=False,
        )
        if not trace.exists() or b"ptrace" in done.stderr:
            pytest.skip("this system lets nobody trace")
        assert done.stdout.decode() == kit.output
        calls.append(Counter(re.findall(r"^(\w+)\(", trace.read_text(), re.MULTILINE)))
    own = {name for name in calls[0] | calls[1] if calls[0][name] != calls[1][name]}
    assert {"openat", "pread64", "fstat", "mmap", "close"} <= own <= CALLS
