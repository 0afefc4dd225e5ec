"""What real processes do beside using libraries whose pages come back."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.rewriting.compact.cut import Cut
from tests.support.cutting import Kit, build_kit, may_mount, needs_runtime

pytestmark = needs_runtime

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


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return build_kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture(scope="module")
def cut(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Cut:
    return kit.cut(tmp_path_factory.mktemp("cut"))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_workers_with_handlers_and_threads_of_their_own(kit: Kit, cut: Cut, when: str) -> None:
    """faulthandler before and after, forks, C handlers, blocked signals, closed descriptors."""
    command = [sys.executable, "-I", "-c", WORKERS, str(cut.library), str(kit.pages), when]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    expected = f"{kit.output.split()[1]} [0, 0, 0, 0]\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs to mount file systems")
def test_a_full_disk_takes_no_log_and_kills_nobody(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    script = (
        f"mount -t tmpfs -o size=64k tmpfs '{mount}' && "
        f"{{ head -c 1M /dev/zero > '{mount}/full' || true; }} 2>/dev/null; "
        f"NEGATIVA_SPARE_LOG='{mount}/logs' '{kit.program}' plain '{cut.library}' {kit.pages}"
    )
    command = ["unshare", "-m", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, kit.output, "")


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
