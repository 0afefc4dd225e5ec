"""The handler of SIGSEGV in ``watch.c``: what it calls, how much stack it takes."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.compiling import CC, needs_compiler
from tests.support.libraries import ROOT

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="page faults are served on x86-64"),
]

# As setup.py compiles them.
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
# In the list of signal-safety(7), but for syscall, which only enters the kernel and sets errno,
# __errno_location, the address of errno, and pthread_getcpuclockid, which reads a field of the
# thread: glibc has them without locks and without allocation.
SAFE = {"sigaction", "sigdelset", "sigprocmask", "getpid", "mprotect", "syscall"} | {
    "__errno_location",
    "madvise",  # the bare system call, as mprotect
    "pthread_getcpuclockid",
    "pthread_self",
}
# Through pointers: the function that serves a fault, and the program's own handler, by two types.
INDIRECT = 3
STACK = 2048


def compile_pages(target: Path) -> None:
    source = str(ROOT / "pytest_negativa/pages/watch.c")
    command = [CC or "cc", *FLAGS, "-fstack-usage", "-o", str(target), source, "-ldl", "-lpthread"]
    subprocess.run(command, check=True, cwd=target.parent)


def calls_of(library: Path) -> dict[str, list[str]]:
    """By function: the functions that it calls or jumps to; ``*`` for a call through a pointer."""
    words = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    function = ""
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            function = head[1]
            found[function] = []
        elif call := re.search(r"\t(call|jmp|j[a-z]+)\s+(\S+)(?: <([^>+]+)(?:\+[^>]*)?>)?", line):
            if call[2].startswith("*"):
                found[function].append("*")
            elif call[3] and call[3] != function:
                found[function].append(call[3])
    return found


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_the_handler_calls_only_what_is_safe(tmp_path: Path) -> None:
    compile_pages(tmp_path / "part.so")
    calls = calls_of(tmp_path / "part.so")
    stack = {
        line.split("\t")[0].rsplit(":", 1)[1].split(".")[0]: int(line.split("\t")[1])
        for path in tmp_path.glob("*.su")
        for line in path.read_text().splitlines()
    }
    outside, pointers = set(), 0

    def deepest(function: str, path: tuple[str, ...]) -> int:
        """Bytes of stack from here on, with return addresses."""
        nonlocal pointers
        assert function not in path, f"{function} may call itself: {path}"
        own = stack.get(function.split(".")[0], 0) + 8
        below = 0
        for callee in calls[function]:
            if callee == "*":
                pointers += 1
            elif callee.endswith("@plt"):
                outside.add(callee.removesuffix("@plt"))
            else:
                below = max(below, deepest(callee, (*path, function)))
        return own + below

    # The compiler may name a part of a function or a special form of it after it.
    handle, serve = (
        next(name for name in calls if name.split(".")[0] == wanted)
        for wanted in ("faults_handle", "serve")
    )
    bytes_of_stack = deepest(handle, ()) + deepest(serve, ())
    assert outside <= SAFE
    assert pointers == INDIRECT
    assert 500 < bytes_of_stack < STACK
