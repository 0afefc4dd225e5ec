"""Child processes that the native library traces, from the driver's start to their end."""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_negativa.models.trace import Usage
from pytest_negativa.tracing.children import Children, injection_library
from tests.support.compiling import compile_shared, needs_compiler
from tests.support.emulators import ANSWERS_FOR_MAPS, not_in_qemu
from tests.support.faults import PlantedFault
from tests.support.injected import Injected, kernels
from tests.support.libraries import IS_ROOT, MULTIARCH, NO_FIXTURES, PLAIN

pytestmark = needs_compiler

USES = "start(); assert use('k') == 0\n"
# clone(2) with SIGCHLD alone, as fork does; aarch64 has no system call for fork itself.
CLONE = f"syscall({220 if platform.machine() == 'aarch64' else 56}, 17, None, None, None, None)"
IN_TMPFS = "mount -t tmpfs -o size={size} none {folder} && "


@pytest.fixture
def injected(tmp_path: Path, driver: Path) -> Iterator[Injected]:
    injection = injection_library()
    assert injection is not None
    started = Injected(tmp_path, driver, injection)
    yield started
    started.close()


def works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(
        command, check=False, capture_output=True
    ).returncode == 0  # fmt: skip


def all_kept(usage: Usage) -> str:
    """The one reason to keep all libraries."""
    [lack] = usage.incomplete
    assert lack.process is None
    return lack.text


@pytest.mark.parametrize(
    ("end", "ended"),
    [("", True), ("os._exit(0)", False), ("os.execv('/bin/true', ['true'])", False)],
)
def test_a_child_that_is_gone_lost_nothing(injected: Injected, end: str, ended: bool) -> None:
    injected.play(f"{USES}{end}")
    usage = injected.usage()
    assert kernels(usage) == {MULTIARCH.name: ["k"]}
    [process] = usage.processes
    assert process.ended is ended and process.header.locked
    assert not usage.incomplete and not injected.untraced()


@pytest.mark.skipif(platform.machine() != "x86_64", reason=NO_FIXTURES)
def test_a_killed_child_has_listed_its_libraries(injected: Injected) -> None:
    """Also a library of which it used nothing: it counts as loaded."""
    injected.play(
        f"{USES}ctypes.CDLL({str(PLAIN)!r})\n"
        # The first handle that the driver gave.
        "kernel, library = ctypes.c_uint64(), ctypes.c_uint64(0x1001)\n"
        "DRIVER.cuLibraryGetKernel(ctypes.byref(kernel), library, b'later')\n"
        "os.kill(os.getpid(), 9)",
        status=-9,
    )
    [loaded] = [x for x in injected.usage().libraries if x.library.path == str(PLAIN)]
    assert not loaded.images
    assert kernels(injected.usage()) == {MULTIARCH.name: ["k", "later"]}


def test_a_child_forked_before_the_driver_started(injected: Injected) -> None:
    injected.play(
        "if os.fork() == 0:\n"
        "    start(); assert use('in the child') == 0\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        f"{USES}"
    )
    usage = injected.usage()
    assert kernels(usage) == {MULTIARCH.name: ["in the child", "k"]}
    assert len(usage.processes) == 2 and not usage.incomplete


def test_a_child_forked_later_cannot_use_the_gpu(injected: Injected) -> None:
    """As a DataLoader's worker: it has no trace, and that is no lack."""
    injected.play(
        f"{USES}if os.fork() == 0:\n    assert start() and use('x')\n    os._exit(0)\nos.wait()\n"
    )
    usage = injected.usage()
    assert kernels(usage) == {MULTIARCH.name: ["k"]}
    assert len(usage.processes) == 1 and not usage.incomplete


@pytest.mark.parametrize("call", ["_Fork()", CLONE])
def test_a_child_made_behind_libcs_back(injected: Injected, call: str) -> None:
    """It ends well, and its parent does not: the end in the trace must not be the child's."""
    injected.play(
        f"{USES}libc = ctypes.CDLL(None)\n"
        f"if libc.{call} == 0: libc.exit(0)\n"
        "assert os.wait()[1] == 0\n"
        "os.kill(os.getpid(), 9)",
        status=-9,
    )
    [process] = injected.usage().processes
    assert not process.ended


def test_a_child_that_finds_the_device_that_its_parent_missed(injected: Injected) -> None:
    injected.environ["STANDIN_NO_DEVICE"] = "1"
    injected.play(
        "assert start() == 100\n"
        "if os.fork() == 0:\n"
        "    del os.environ['STANDIN_NO_DEVICE']\n"
        f"    {USES.strip()}\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    usage = injected.usage()
    assert kernels(usage) == {MULTIARCH.name: ["k"]} and not usage.incomplete


@pytest.mark.planted_fault(
    "The CUPTI of a child process does not know a driver call that names kernels",
    says="CUPTI can't show cuLibraryEnumerateKernels: error 1",
)
def test_a_cupti_that_lacks_a_call(injected: Injected, fault: PlantedFault) -> None:
    injected.environ["STANDIN_CUPTI_OLD"] = "1"
    injected.play(USES)
    usage = injected.usage()
    assert kernels(usage) == {MULTIARCH.name: ["k"]}
    fault.check(all_kept(usage))


@pytest.mark.planted_fault(
    "A profiler holds CUPTI in a child process, which ends by os._exit",
    says="CUPTI serves one tool at a time",
)
def test_taken_cupti(injected: Injected, fault: PlantedFault) -> None:
    injected.environ["STANDIN_CUPTI_TAKEN"] = "1"
    injected.play(f"{USES}os._exit(0)")
    fault.check(all_kept(injected.usage()))


def test_cupti_that_several_share(injected: Injected) -> None:
    injected.environ |= {"STANDIN_CUPTI_TAKEN": "1", "STANDIN_CUPTI_SHARES": "1"}
    injected.play(USES)
    usage = injected.usage()
    assert kernels(usage) == {MULTIARCH.name: ["k"]} and not usage.incomplete


def test_a_program_prints_although_its_output_is_closed(injected: Injected) -> None:
    """As a daemon may: what it prints gets into no trace."""
    printing = "libc = ctypes.CDLL(None); libc.puts(b'printed'); libc.fflush(None)\n"
    injected.play(f"os.close(1)\n{USES}{printing}assert use('later') == 0\n")
    usage = injected.usage()
    assert kernels(usage) == {MULTIARCH.name: ["k", "later"]} and not usage.incomplete


@pytest.mark.planted_fault(
    "A signal handler of a child process calls exit() while a driver call is recorded",
    says="a signal handler interrupted a record",
)
def test_exit_in_a_signal_handler(injected: Injected, fault: PlantedFault) -> None:
    """C++ programs do so, although exit() is not in signal-safety(7)."""
    injected.play(
        "import signal\n"
        "start()\n"
        # A cubin on the heap: hashing it takes longer than the timer.
        "image = ctypes.create_string_buffer(64 << 20)\n"
        "image.raw = b'\\x7fELF' + bytes(36) + len(image).to_bytes(8, 'little')\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.signal(signal.SIGPROF, libc.exit)\n"
        "signal.setitimer(signal.ITIMER_PROF, 0.01)\n"
        "DRIVER.cuLibraryLoadData(ctypes.byref(ctypes.c_uint64()), image)\n",
        status=27,
    )
    all_kept(injected.usage())
    [told] = injected.untraced()
    fault.check(told)


@pytest.mark.planted_fault(
    "A daemon that a test started still uses the GPU when the traces are merged",
    says="it is still running",
)
def test_a_daemon(injected: Injected, fault: PlantedFault) -> None:
    with injected.running(USES):
        fault.check(all_kept(injected.usage()))
    assert not injected.usage().incomplete


@pytest.mark.planted_fault(
    "The trace of a child process reaches the limit of file sizes",
    says="a record could not be written: is the disk full, or a quota reached?",
)
def test_the_limit_of_file_sizes(injected: Injected, fault: PlantedFault) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
    injected.play(f"{limited}start()\nfor i in range(100): assert use('k' * i) == 0\n")
    usage = injected.usage()
    assert not usage.processes[0].ended
    fault.check(all_kept(usage))
    [told] = injected.untraced()
    assert told.endswith("the limit of file sizes (ulimit -f) is reached")


@pytest.mark.planted_fault(
    "The user's quota of disk space is used up in the middle of a child's trace",
    says="a record could not be written: is the disk full, or a quota reached?",
)
def test_a_quota(injected: Injected, tmp_path: Path, fault: PlantedFault) -> None:
    quota = compile_shared("quota.c", tmp_path / "quota.so")
    # Behind what is preloaded already: a sanitizer's runtime must come first.
    injected.environ["LD_PRELOAD"] = f"{os.environ.get('LD_PRELOAD', '')}:{quota}".lstrip(":")
    injected.play("start()\nfor i in range(100): assert use('k' * i) == 0\n")
    usage = injected.usage()
    assert not usage.processes[0].ended
    fault.check(all_kept(usage))
    [told] = injected.untraced()
    assert told.endswith("Disk quota exceeded")


def test_process_numbers_start_again(injected: Injected) -> None:
    """Two children of one number are two: the kernel gives numbers anew once all were used."""
    if not works(
        "unshare", "-Urpf", "--mount-proc", "sh", "-c", "echo 9 > /proc/sys/kernel/ns_last_pid"
    ):
        pytest.skip("no namespaces of process numbers")
    again = "echo 99 > /proc/sys/kernel/ns_last_pid; "
    program = f'{again} "$@" one; {again} "$@" other'
    statements = "start(); assert use(sys.argv[-1]) == 0\n"
    injected.play(statements, "unshare", "-Urpf", "--mount-proc", "sh", "-c", program, "sh")
    usage = injected.usage()
    assert [process.header.pid for process in usage.processes] == [100, 100]
    assert all(process.ended for process in usage.processes)
    assert not usage.incomplete
    assert kernels(usage)[MULTIARCH.name] == ["one", "other"]


@pytest.mark.slow
@pytest.mark.planted_fault(
    "The disk is full in the middle of a child's trace",
    says="a record could not be written: is the disk full, or a quota reached?",
)
def test_a_full_disk(injected: Injected, tmp_path: Path, fault: PlantedFault) -> None:
    if not works("unshare", "-Urm", "true"):
        pytest.skip("no mount namespaces")
    copy = tmp_path / "copy"
    folder = injected.run.trace_dir
    command = IN_TMPFS.format(size="64k", folder=folder) + f'"$@" && cp -a {folder} {copy}'
    statements = "start()\nfor i in range(2000): assert use('k' * i) == 0\n"
    injected.play(statements, "unshare", "-Urm", "sh", "-c", command, "sh")
    [trace] = copy.iterdir()
    shutil.copy(trace, folder)
    usage = injected.usage()
    assert usage.processes[0].torn and not usage.processes[0].ended
    fault.check(all_kept(usage))
    [told] = injected.untraced()
    assert told.endswith(("No space left on device", "no space for a whole line"))


@pytest.mark.slow
@not_in_qemu("writes its /proc/self/maps to a file, which the limit cuts")
def test_a_limit_at_every_place(injected: Injected) -> None:
    """Wherever writing fails, the trace is told from a whole one."""
    statements = "start(); use('k' * 300); use('other', 1)\n"
    injected.play(statements)
    [whole] = injected.run.trace_files()
    size = whole.stat().st_size
    whole.unlink()
    for limit in (*range(0, size, 61), size - 1):
        limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
        injected.play(f"{limited}\n{statements}")
        [trace] = injected.run.trace_files()
        assert trace.stat().st_size <= limit
        assert all_kept(injected.usage())
        trace.unlink()


@pytest.mark.slow
def test_a_killed_child_lost_nothing(injected: Injected) -> None:
    """Whenever it is killed: what it could use is in its trace."""
    loop = "start()\nfor i in range(10**6):\n    use(f'k{i}')\n    print(i, flush=True)\n"
    chance = random.Random(1)
    for _ in range(30):
        with subprocess.Popen(
            injected.command(loop), env=injected.environ, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            for _ in range(chance.randrange(1, 60)):
                process.stdout.readline()
            time.sleep(chance.random() / 500)
            process.kill()
            lines = process.stdout.read().splitlines()
        usage = injected.usage()
        assert not usage.incomplete
        used = len(kernels(usage)[MULTIARCH.name])
        assert used > int(lines[-1]) if lines else used
        for trace in injected.run.trace_files():
            trace.unlink()


@pytest.mark.planted_fault(
    "A child process closes all descriptors, that of its trace too, and goes on using the GPU",
    says="a record could not be written",
)
def test_closed_descriptors(injected: Injected, tmp_path: Path, fault: PlantedFault) -> None:
    own = tmp_path / "own"
    injected.play(
        f"{USES}os.closerange(3, 99)\n"
        f"files = [open({str(own)!r}, 'w') for _ in range(20)]\n"
        "assert use('later') == 0\n"
    )
    assert not own.read_bytes(), "the program's own file"
    fault.check(all_kept(injected.usage()))


@pytest.mark.planted_fault(
    "A test deletes the traces of child processes that still use the GPU",
    says="its trace was deleted",
)
def test_a_deleted_trace(injected: Injected, fault: PlantedFault) -> None:
    folder = str(injected.run.trace_dir)
    injected.play(
        f"{USES}for name in os.listdir({folder!r}): os.unlink(os.path.join({folder!r}, name))\n"
    )
    assert not injected.run.trace_files()
    [told] = injected.untraced()
    fault.check(told)


def test_a_thread_is_cancelled_while_its_call_is_recorded(injected: Injected) -> None:
    """It would take the lock with it, and the next driver call would wait for ever."""
    injected.play(
        "import signal\n"
        "signal.alarm(30)\n"
        "start()\n"
        # Without giving the interpreter's lock away, which has cancellation points of its own.
        "libc, driver = ctypes.PyDLL(None), ctypes.PyDLL(DRIVER._name)\n"
        "libc.pthread_self.restype = ctypes.c_void_p\n"
        "libc.pthread_cancel(ctypes.c_void_p(libc.pthread_self()))\n"
        "driver.cuLibraryGetKernel(ctypes.byref(ctypes.c_uint64()), ctypes.c_uint64(1), b'k')\n"
        "libc.pthread_setcancelstate(1, None)\n"
        f"{USES}"
    )
    assert kernels(injected.usage()) == {MULTIARCH.name: ["k"]}


@pytest.mark.planted_fault(
    "A child process runs as another user, who may not enter the run's folder",
    says="Permission denied",
)
@pytest.mark.skipif(not IS_ROOT, reason="only root may become another user")
def test_another_user(injected: Injected, tmp_path: Path, fault: PlantedFault) -> None:
    injected.run.folder.chmod(0o700)
    injected.play("os.setgid(65534); os.setuid(65534); start()")
    assert not injected.run.trace_files()
    [told] = injected.untraced()
    assert "user 65534" in told
    fault.check(told)


def test_the_first_process_of_a_namespace(injected: Injected) -> None:
    """Its number is 1, in every container; nothing is told by numbers."""
    start = ("unshare", "-Urpf")
    if not works(*start, "true"):
        pytest.skip("no namespaces")
    injected.play(f"assert os.getpid() == 1\n{USES}os._exit(0)", *start)
    usage = injected.usage()
    assert usage.processes[0].header.pid == 1
    assert kernels(usage) == {MULTIARCH.name: ["k"]} and not usage.incomplete
    with injected.running(USES):
        assert len(injected.usage().incomplete) == 1


@pytest.mark.parametrize("call", ["_Fork()", CLONE])
def test_a_child_with_its_parents_id_made_behind_libcs_back(injected: Injected, call: str) -> None:
    start = ("unshare", "-Urpf")
    if not works(*start, "true"):
        pytest.skip("no namespaces")
    injected.play(
        f"{USES}libc = ctypes.CDLL(None)\n"
        "assert libc.unshare(0x20000000) == 0\n"
        f"child = libc.{call}\n"
        "assert os.getpid() == 1\n"
        "if child == 0: libc.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert use('later') == 0\n"
        "os._exit(0)",
        *start,
    )
    [process] = injected.usage().processes
    assert not process.ended
    assert kernels(injected.usage()) == {MULTIARCH.name: ["k", "later"]}


@pytest.mark.planted_fault(
    "A test starts a session with --negativa, and a child of that session uses the GPU.",
    says="it is traced into another run",
)
def test_a_child_of_a_session_within_sessions(injected: Injected, fault: PlantedFault) -> None:
    outer, outermost = Children(), Children()
    injected.environ["NEGATIVA_OUTER_LACKS"] = f"{outermost.name},{outer.name}"
    injected.play("start()")
    assert not list(outer.untraced()), "it used no GPU code"
    injected.play(USES)
    for session in (outer, outermost):
        [lack] = session.untraced()
        fault.check(lack)
        session.close()
    assert kernels(injected.usage()) == {MULTIARCH.name: ["k"]} and not injected.untraced()


def test_a_library_that_is_replaced_is_another_library(injected: Injected, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    shutil.copy(MULTIARCH, library)
    other = tmp_path / "other.so"
    other.write_bytes(MULTIARCH.read_bytes() + b"\n")
    injected.play(
        "start(); use('old')\n_keep.clear()\n"
        f"os.rename({str(other)!r}, {str(library)!r})\n"
        "use('new')\n",
        library=library,
    )
    found = {
        used.library.size: [k for i in used.images for k in i.kernels]
        for used in injected.usage().libraries
        if used.library.path == str(library)
    }
    size = MULTIARCH.stat().st_size
    assert found == {size: ["old"], size + 1: ["new"]}


@pytest.mark.planted_fault(
    "A child process changes its root to a folder without /proc",
    says="/proc/self/maps cannot be read",
)
@pytest.mark.skipif(not IS_ROOT, reason="only root may change the root")
@not_in_qemu(ANSWERS_FOR_MAPS)
def test_chroot(injected: Injected, tmp_path: Path, fault: PlantedFault) -> None:
    injected.play(
        "start()\n"
        "opened = _LIBRARY.open('rb')\n"
        "class _LIBRARY:\n"
        "    open = lambda mode: opened\n"
        f"os.chroot({str(tmp_path)!r})\n"
        "use('k')\n"
    )
    fault.check("\n".join(lack.text for lack in injected.usage().incomplete))
