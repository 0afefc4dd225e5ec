"""The kernel pages a library whose pages lie in a spare: programs, system calls and tools see that
of the original."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from pytest_negativa.models.spans import covers
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


SUMS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for _ in range(int(sys.argv[2])): library.sum(0, 200)
"""


def test_perf_names_functions_in_the_spare(kit: Kit, tmp_path: Path) -> None:
    """By the symbols that are in the spare, too: all but those on the page that ends the data."""
    perf = shutil.which("perf")
    if perf is None:
        pytest.skip("needs perf")
    (tmp_path / "padding.s").write_text('.section .padding, ""\n.skip 8192\n')
    library = compile_library(tmp_path, str(tmp_path / "padding.s"))
    cut = dataclasses.replace(kit, library=library).cut(tmp_path / "cut")
    data = tmp_path / "perf.data"
    # The original's file, if perf has it from another run, lies otherwise.
    command: list[str | Path] = [perf, "--buildid-dir", tmp_path / "cache"]
    record = [*command, "record", "-q", "-e", "cpu-clock", "-o", data]
    sums = [sys.executable, "-I", "-S", "-c", SUMS, str(cut.library), "100000"]
    if subprocess.run([*record, *sums], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system lets perf measure nothing")
    script = [*command, "script", "-i", data, "-F", "ip,sym,dso"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert f" sum ({cut.spare})" in done.stdout


# Arguments: the type of event, a file, an offset in it, the library.
COUNTS = """
import ctypes, os, struct, sys
kind, path, offset, library = sys.argv[1:]
name = ctypes.create_string_buffer(path.encode())
# struct perf_event_attr: its type, its size, the path, and the offset.
words = int(kind), 112, *[0] * 7, ctypes.addressof(name), int(offset)
event = struct.pack("<II5QII2Q", *words).ljust(112, bytes(1))
counter = ctypes.CDLL(None).syscall(298, event, 0, -1, -1, 0)
if counter < 0:
    sys.exit(5)
print(*[ctypes.CDLL(library).interrupted() for _ in range(3)], end=" ")
print(int.from_bytes(os.read(counter, 8), "little"))
"""


def test_a_probe_in_the_spare_is_at_the_originals_offset(kit: Kit, cut: Cut) -> None:
    kind = Path("/sys/bus/event_source/devices/uprobe/type")
    if not kind.exists() or os.geteuid() != 0:
        pytest.skip("needs root, and a kernel with uprobes")
    with kit.library.open("rb") as file:
        elf = ELFFile(file)
        symbols = elf.get_section_by_name(".dynsym")
        assert isinstance(symbols, SymbolTableSection)
        [symbol] = symbols.get_symbol_by_name("interrupted") or []
        offset = next(elf.address_offsets(symbol["st_value"]))
    assert covers(cut.holes, offset, offset + 6)
    for path, library in ((kit.library, kit.library), (cut.spare, cut.library)):
        words = [kind.read_text().strip(), str(path), str(offset), str(library)]
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", COUNTS, *words],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 5:
            pytest.skip("this system allows no probes")
        assert (done.stdout, done.stderr) == ("77 77 77 3\n", "")
