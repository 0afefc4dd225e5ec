"""What real processes do beside using libraries whose pages come back."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_negativa.models.spans import size
from pytest_negativa.rewriting.compact.cut import cut_library
from pytest_negativa.rewriting.compact.records import Cut
from tests.support.compiling import SOURCES, compile_shared
from tests.support.cutting import OPTIONS, Kit, logged, needs_stub

pytestmark = needs_stub

LIBPYTHON = Path(
    sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or ""
)

# What a program inherits, and what it hands on: by vfork, and in a forked child.
INHERITS = """
import faulthandler, multiprocessing, os, subprocess, sys
faulthandler.enable()
def show():
    words = [sys.executable, "-c", "import os; print(os.environ.get('SETTING'))"]
    print(os.environ.get("SETTING"), subprocess.check_output(words), faulthandler.is_enabled())
    sys.stdout.flush()
show()
worker = multiprocessing.get_context("fork").Process(target=show)
worker.start()
worker.join()
with open("/proc/self/maps") as maps:
    print(sys.argv[1] in maps.read(), worker.exitcode, file=sys.stderr)
"""

# Arguments: the library, its number of pages. All of it prints the sum of a page's functions.
WORKERS = """
import ctypes, faulthandler, os, signal, sys, threading
BEFORE = "before" in sys.argv
if BEFORE:
    faulthandler.enable()
library = ctypes.CDLL(sys.argv[1])
faulthandler.enable()
faulthandler.register(signal.SIGUSR1)
pages = int(sys.argv[2])

def use(start=0):
    return sum(library.sum(i, i + 1) for i in (*range(start, pages), *range(start)))

def worker(number):
    # As PyTorch's DataLoader does in each worker: a C handler for SIGSEGV.
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(ctypes.c_int(signal.SIGSEGV), ctypes.c_void_p(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    sums = []
    threads = [
        threading.Thread(target=lambda n=n: sums.append(use(n * pages // 8))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0 if set(sums) == {use()} and len(sums) == 8 else 3)

children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        worker(number)
    children.append(child)
os.closerange(3, 256)
found = use()
statuses = [os.waitpid(child, 0)[1] for child in children]
print(found, statuses)
"""


# Arguments: a library, another one of the same functions, its number of pages. Threads use the one
# while the other comes and goes.
RELOADS = """
import _ctypes, ctypes, sys, threading
pages = int(sys.argv[3])
stay = ctypes.CDLL(sys.argv[1])
going = True
sums = set()

def use(library):
    return sum(library.sum(i, i + 1) + library.thrown(i % 150) - i % 150 for i in range(pages))

def work():
    while going:
        sums.add(use(stay))

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for _ in range(12):
    library = ctypes.CDLL(sys.argv[2])
    sums.add(use(library))
    _ctypes.dlclose(library._handle)
going = False
for thread in threads:
    thread.join()
print(*sums)
"""
# Says when it may be looked at, waits for a line, and works for a second of CPU time.
WATCHED = """
import ctypes, sys, time
library = ctypes.CDLL(sys.argv[1])
half = int(sys.argv[2]) // 2
def use(start, end):
    return sum(library.sum(i, i + 1) for i in range(start, end))
first = use(0, half)
print("ready", flush=True)
sys.stdin.readline()
print(first + use(half, 2 * half), library.thrown(120))
def work():
    for _ in range(100):
        library.sum(0, 2 * half)
end = time.process_time() + 1
while time.process_time() < end:
    work()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_logged", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_workers_with_handlers_and_threads_of_their_own(
    kit: Kit, cut: Cut, tmp_path: Path, when: str, is_logged: bool
) -> None:
    """faulthandler before and after, forks, C handlers, blocked signals, closed descriptors."""
    command = [sys.executable, "-I", "-c", WORKERS, str(cut.library), str(kit.pages), when]
    environ = {**os.environ, **(logged(tmp_path / "logs") if is_logged else {})}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    expected = f"{kit.output.split()[1]} [0, 0, 0, 0]\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb")
def test_under_a_debugger_that_passes_the_signal(kit: Kit, cut: Cut) -> None:
    run = f"run threads {cut.library} {kit.pages}"
    words = ["-ex", "handle SIGSEGV nostop noprint pass", "-ex", run]
    done = subprocess.run(
        ["gdb", "-batch", "-nx", *words, str(kit.program)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert kit.output in done.stdout and "exited normally" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_logged", [False, True])
def test_threads_use_a_library_while_another_comes_and_goes(
    kit: Kit, tmp_path: Path, is_logged: bool
) -> None:
    """Each reload must find its holes empty again."""
    paths = [kit.cut(tmp_path / name, [(0, at)]).library for name, at in (("a", 1), ("b", 8192))]
    command = [sys.executable, "-I", "-c", RELOADS, *map(str, paths), str(kit.pages)]
    environ = {**os.environ, **(logged(tmp_path / "logs") if is_logged else {})}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    expected = f"{kit.output.split()[1]}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def watch(kit: Kit, cut: Cut, mark: str, *command: str) -> str:
    """Attach a tool to a process that has misses before and under it; the tool's output.

    The tool prints the mark when it is attached.
    """
    words = [sys.executable, "-I", "-c", WATCHED, str(cut.library), str(kit.pages)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        tool = subprocess.Popen(
            [word.format(pid=process.pid) for word in command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert tool.stdout is not None
        seen = ""
        # Attached, or it can't.
        while mark not in seen and (line := tool.stdout.readline()):
            seen += line
        out, errors = process.communicate("go\n", timeout=300)
        seen += tool.communicate(timeout=300)[0]
    assert (process.returncode, out, errors) == (0, f"{kit.output.split()[1]} 120\n", ""), seen
    return seen


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb")
def test_a_debugger_attaches(kit: Kit, cut: Cut) -> None:
    words = ("handle SIGSEGV nostop noprint pass", "echo attached\\n", "continue")
    options = [word for command in words for word in ("-ex", command)]
    seen = watch(kit, cut, "attached", "gdb", "-batch", "-nx", *options, "-p", "{pid}")
    assert "exited normally" in seen or "not permitted" in seen


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_system_calls_are_traced(kit: Kit, cut: Cut) -> None:
    seen = watch(
        kit,
        cut,
        "attached",
        "strace",
        "-f",
        "-e",
        "signal=SIGSEGV",
        "-e",
        "trace=mremap",
        "-p",
        "{pid}",
    )
    assert "SIGSEGV" not in seen and ("exited with 0" in seen or "not permitted" in seen)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("py-spy") is None, reason="needs py-spy")
@pytest.mark.parametrize("native", [False, True])
def test_a_profiler_samples(kit: Kit, cut: Cut, native: bool, tmp_path: Path) -> None:
    """py-spy stops the process, and reads its memory and its libraries."""
    profile = tmp_path / "profile"
    options = ["--rate", "100", "--format", "raw", "--output", str(profile)]
    words = ["py-spy", "record", *options, *(["--native"] if native else []), "--pid", "{pid}"]
    seen = watch(kit, cut, "Sampling process", *words)
    if "ermission" in seen:
        pytest.skip("may not attach")
    assert "work (<string>" in profile.read_text(), seen


@pytest.mark.slow
@pytest.mark.skipif(not LIBPYTHON.is_file(), reason="needs a shared libpython")
def test_an_interpreter_whose_code_is_cut(tmp_path: Path) -> None:
    """Python itself: nearly all of its code lies in a library that it is linked with."""
    cut = cut_library(LIBPYTHON, tmp_path / LIBPYTHON.name, tmp_path, [], OPTIONS)
    command = [sys.executable, "-I", "-c", INHERITS, str(tmp_path)]
    replaced = {"SETTING": "1", "LD_LIBRARY_PATH": str(tmp_path)}
    found = [
        subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        for environ in ({"SETTING": "1"}, replaced, {**replaced, **logged(tmp_path / "logs")})
    ]
    if found[1].stderr.startswith("False"):
        pytest.skip("the interpreter looks for its library elsewhere")
    assert size(cut.holes) > 1 << 20 and found[1].stderr == "True 0\n"
    assert found[0].stdout == found[1].stdout == found[2].stdout != ""


def both(words: Sequence[str], libraries: Sequence[Path], kit: Kit) -> str:
    """The output of a program, which is the same for the library and the cut one."""
    first, second = (
        subprocess.run(
            [*words, library, str(kit.pages)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        for library in libraries
    )
    assert (first.returncode, first.stderr) == (second.returncode, second.stderr) == (0, "")
    assert first.stdout == second.stdout
    return first.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("javac") is None, reason="needs a JDK")
def test_a_java_machine(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    """It has a handler of SIGSEGV for null pointers and full stacks, and blocks signals."""
    subprocess.run(["javac", "-d", tmp_path, SOURCES / "spare" / "Host.java"], check=True)
    bridges = []
    for library in (kit.library, cut.library):
        bridges.append(tmp_path / library.parent.name / "libbridge.so")
        bridges[-1].parent.mkdir()
        flags = ("-L", str(library.parent), "-lpages", "-Wl,-rpath," + str(library.parent))
        compile_shared("spare/jni.c", bridges[-1], *flags)
    output = both(["java", "-cp", str(tmp_path), "Host"], bridges, kit)
    assert output == ", ".join([f"{kit.output.split()[1]} 30 20001"] * 8) + "\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")
def test_goroutines(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    """Go sets its handlers by system calls, and interrupts its threads by signals."""
    environ = {**os.environ, "GO111MODULE": "off", "GOCACHE": str(tmp_path / "cache")}
    build: list[str | Path] = ["go", "build", "-o", tmp_path / "host"]
    subprocess.run([*build, SOURCES / "spare" / "host.go"], env=environ, check=True)
    output = both([str(tmp_path / "host")], (kit.library, cut.library), kit)
    assert output == f"[{' '.join([f'{kit.output.split()[1]} 30 100'] * 16)}]\n"


# Its result, and who computed it.
APPLICATION = """
import ctypes, os
library = ctypes.CDLL(os.environ["LIBRARY"])
pages = int(os.environ["PAGES"])
def application(environ, start_response):
    total = sum(library.sum(i, i + 1) for i in range(pages))
    body = f"{total} {library.thrown(30)} {os.getpid()}".encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--preload"]])
def test_workers_of_a_server(kit: Kit, cut: Cut, tmp_path: Path, options: list[str]) -> None:
    """gunicorn: threads in forked workers, which are replaced while they serve."""
    pytest.importorskip("gunicorn")
    (tmp_path / "served.py").write_text(APPLICATION)
    environ = {**os.environ, "LIBRARY": str(cut.library), "PAGES": str(kit.pages)}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(64)

        def ask(_: int = 0) -> tuple[str, ...]:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(120)
                client.connect(str(tmp_path / "socket"))
                client.sendall(b"GET / HTTP/1.0\r\n\r\n")
                with client.makefile("rb") as answer:
                    return tuple(answer.read().decode().rpartition("\r\n\r\n")[2].split())

        server = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", *options, "--workers=3", "--threads=4",
             f"--bind=fd://{listener.fileno()}", "served:application"],
            env=environ, cwd=tmp_path, pass_fds=[listener.fileno()], stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(ask, range(40)))
                server.send_signal(signal.SIGHUP)
                before = {pid for *_, pid in answers}
                while answers[-1][-1] in before:
                    answers.append(ask())
                answers += pool.map(ask, range(40))
        finally:
            server.terminate()
            _, errors = server.communicate(timeout=120)
    assert server.returncode == 0 and "was sent" not in errors, errors
    assert {tuple(rest) for *rest, _ in answers} == {(kit.output.split()[1], "30")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["valgrind", "-q"], ["runsc", "--rootless", "--network=none", "do"]]
)
def test_a_machine_in_software(kit: Kit, cut: Cut, words: list[str]) -> None:
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]}")
    if subprocess.run([*words, "/bin/true"], capture_output=True).returncode != 0:
        pytest.skip(f"{words[0]} runs nothing here")
    output = both([*words, str(kit.program), "threads"], (kit.library, cut.library), kit)
    assert output == kit.output
