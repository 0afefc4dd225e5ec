"""The handlers of SIGSEGV: what they call, how much stack they take, threads, damaged tables."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.compiling import CC, SOURCES, needs_compiler
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
# Through pointers: _dl_find_object, which the manual of glibc calls async-signal-safe, the function
# of each part that serves a fault, and the program's own handler, by two types.
INDIRECT = {"spare/runtime": 4, "processes/pages": 3}
SERVES = {"spare/runtime": "bring_back", "processes/pages": "serve"}
STACK = 2048


def compile_part(part: str, target: Path, *flags: str) -> None:
    command = [
        CC or "cc",
        *FLAGS,
        *flags,
        "-o",
        str(target),
        str(ROOT / f"pytest_negativa/{part}.c"),
    ]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True, cwd=target.parent)


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
@pytest.mark.parametrize("part", SERVES)
def test_a_handler_calls_only_what_is_safe(tmp_path: Path, part: str) -> None:
    compile_part(part, tmp_path / "part.so", "-fstack-usage")
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
        for wanted in ("faults_handle", SERVES[part])
    )
    bytes_of_stack = deepest(handle, ()) + deepest(serve, ())
    assert outside <= SAFE
    assert pointers == INDIRECT[part]
    assert 500 < bytes_of_stack < STACK


def compile_harness(folder: Path, sanitizers: str) -> Path:
    target = folder / "handler"
    command = [CC or "cc", "-std=gnu11", "-g", "-O1", "-pthread", f"-fsanitize={sanitizers}"]
    source = str(SOURCES / "spare" / "handler.c")
    flags = ["-fno-sanitize-recover=all", "-Wno-unused-function", "-o", str(target), source]
    subprocess.run([*command, *flags], check=True)
    return target


@pytest.mark.slow
def test_threads_race_for_pages_and_set_handlers(tmp_path: Path) -> None:
    """Under ThreadSanitizer: 200 turns of eight threads, some without the spare at first."""
    program = compile_harness(tmp_path, "thread")
    # Its shadow memory has a fixed place, where a random layout may have put something.
    command = ["setarch", "-R", str(program), "race", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[:4000]
    assert "ThreadSanitizer" not in done.stderr


@pytest.mark.slow
def test_a_thread_may_always_be_the_second_at_a_page(tmp_path: Path) -> None:
    """As one of a pool that uses a library which is loaded again and again."""
    words = [str(compile_harness(tmp_path, "undefined")), "tries", str(tmp_path)]
    assert subprocess.run(words, capture_output=True, check=False).stdout == b"done\n"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_tables(tmp_path: Path, seed: int) -> None:
    """Refused, or served from where they say: nothing outside is read or changed."""
    program = compile_harness(tmp_path, "address,undefined")
    words = [str(program), "hostile", str(seed), "10000", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    inputs, pages = (int(word) for word in done.stdout.split()[::2])
    # Many are damaged, and many are not.
    assert inputs == 10_000 and pages > 3_000
    assert done.stderr.count(b"table of missing pages is damaged") > 10_000
