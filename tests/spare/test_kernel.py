"""The kernel pages a library whose pages lie in a spare: programs, system calls and tools see that
of the original."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from pytest_negativa.rewriting.compact.records import Cut
from tests.support.compiling import compile_c, compile_shared
from tests.support.cutting import Kit, compile_library, logged, needs_stub

pytestmark = needs_stub

# What the program does beside using all pages, see by_kernel in program.c.
DEEDS = [
    "pipe", "another-process", "memory-file", "shared-signal-stack", "freed-signal-stack", "fork",
    "spawn", "namespace", "often", "locked", "limited-memory", "smallest-stack", "cancelled",
    "object", "restartable",
]  # fmt: skip
# What a preloaded library or a sanitizer has a hand in.
SIGNALS = ["plain", "threads", "blocked", "handler-before", "handler-after", "alarms"]


def both(
    program: Path, kit: Kit, cut: Cut, what: str, environ: dict[str, str] | None = None
) -> str:
    """The output of a program, which is the same with the original and the cut library."""
    outcomes = []
    for library in (kit.library, cut.library):
        done = subprocess.run(
            [program, what, library, str(kit.pages)],
            env=environ or {},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done
        outcomes.append((done.stdout, done.stderr))
    assert outcomes[0] == outcomes[1]
    return outcomes[0][0]


@pytest.mark.parametrize("what", DEEDS)
def test_the_kernel_sees_the_pages(kit: Kit, cut: Cut, what: str) -> None:
    output = both(kit.program, kit, cut, what)
    assert kit.output in output
    if what == "cancelled":
        assert output.startswith("1 1\n")
    elif what == "object":
        in_headers, by_address, frames, symbol = map(int, output.split()[:4])
        assert in_headers == by_address == kit.pages and frames > 3 and symbol == 0
    elif what == "namespace":
        assert output.startswith(f"1 {kit.output.split()[1]}\n")
    elif what == "restartable":
        assert output.split()[0] in ("77", "0")


def test_restartable_sequences_are_never_logged(kit: Kit, tmp_path: Path) -> None:
    """The kernel reads code before a sequence goes on there, and kills a process if it can't."""
    library = compile_library(tmp_path, "-DRESTARTABLE")
    kit = dataclasses.replace(kit, library=library)
    cut = kit.cut(tmp_path / "cut")
    original = kit.run("restartable", library)
    assert original.returncode == 0 and kit.output in original.stdout
    logs = tmp_path / "logs"
    for environ in ({}, logged(logs)):
        found = kit.run("restartable", cut.library, environ=environ)
        assert (found.returncode, found.stdout) == (0, original.stdout)
    message = f"negativa: {logs}: no log of what comes back to libpages.so can be written here: "
    assert found.stderr.startswith(message + "it has restartable sequences")
    assert found.stderr.count("\n") == 1 and not [*logs.iterdir()]


@pytest.mark.parametrize("what", SIGNALS)
def test_a_preloaded_library_has_the_functions_for_signals(
    kit: Kit, cut: Cut, tmp_path: Path, what: str
) -> None:
    preloaded = compile_shared("spare/interposer.c", tmp_path / "libinterposer.so")
    assert kit.output in both(kit.program, kit, cut, what, {"LD_PRELOAD": str(preloaded)})


@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
def test_a_program_with_a_sanitizer(kit: Kit, cut: Cut, tmp_path: Path, sanitizer: str) -> None:
    # Its own functions for exceptions look for libstdc++'s once, at the start.
    flags = (f"-fsanitize={sanitizer}", "-Wl,--no-as-needed", "-lstdc++")
    try:
        program = compile_c("spare/program.c", tmp_path / "program", *flags)
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no such sanitizer")
    for what in ("plain", "blocked", "pipe", "object"):
        assert kit.output in both(program, kit, cut, what)


def test_the_interpreter_handles_faults_and_its_threads_block_signals(kit: Kit, cut: Cut) -> None:
    code = f"""
import ctypes, faulthandler, os, signal, sys, threading
faulthandler.enable()
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
sums = []
def use():
    library = ctypes.CDLL(sys.argv[1])
    sums.append((library.sum(0, {kit.pages}), library.thrown(30)))
thread = threading.Thread(target=use)
thread.start()
thread.join()
print(sums, flush=True)
library = ctypes.CDLL(sys.argv[1])
library.page.restype = ctypes.c_void_p
os.write(1, ctypes.string_at(library.page(3), 4096))
"""
    first, second = (
        subprocess.run([sys.executable, "-I", "-c", code, library], capture_output=True, check=True)
        for library in (kit.library, cut.library)
    )
    assert (first.stdout, first.stderr) == (second.stdout, second.stderr)
    assert first.stdout.startswith(f"[({kit.output.split()[1]}, 30)]".encode())


def test_a_segment_starting_with_a_hole_is_found_by_its_headers(kit: Kit, tmp_path: Path) -> None:
    """Its code comes first, as no constructors and no table of jumps are before it."""
    library = compile_library(tmp_path, "-nostartfiles", "-fno-plt", "-Wl,-z,now")
    kit = dataclasses.replace(kit, library=library)
    cut = kit.cut(tmp_path / "cut")
    with cut.library.open("rb") as file:
        loads = [s.header for s in ELFFile(file).iter_segments("PT_LOAD")]
    first = next(load for load in loads if load.p_flags & 1)
    assert first.p_vaddr - first.p_offset > 4096 * kit.pages
    assert both(kit.program, kit, cut, "object").startswith(f"{kit.pages} {kit.pages} ")
