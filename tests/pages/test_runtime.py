"""Processes use libraries whose pages lie in a spare: every result is the original's.

The kernel brings the pages in. With a log, they are inaccessible until they are touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import size
from pytest_negativa.rewriting.compact.cut import CutOptions, cut_library
from pytest_negativa.rewriting.compact.rebuild import read_note
from pytest_negativa.rewriting.compact.records import Cut
from pytest_negativa.slimming.spares import problem_of
from tests.support.compiling import compile_c, compile_shared
from tests.support.cutting import (
    Kit,
    compile_later,
    logged,
    may_mount,
    needs_stub,
)
from tests.support.faults import PlantedFault

pytestmark = needs_stub

# What ld.so says of a library whose spare it can't have; the program prints it, and ends with 3.
REFUSED = "undefined symbol: [negativa] its spare "


def is_refused(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 3 and REFUSED in done.stdout and not done.stderr


@pytest.mark.parametrize(
    "what",
    [
        "plain",
        "threads",
        "small-stack",
        "alternate-stack",
        "alarms",
        "mdwe",
        "blocked",
        "handler-before",
        "handler-after",
        "handler-needs-pages",
        "handler-crashes",
        "handler-unblocks",
        "handler-of-another",
        "by-handle",
        "vfork",
        "vfork-in-fork",
        "vfork-in-_Fork",
        "vfork-in-forkpty",
        "vfork-in-daemon",
        "closed",
        "deleted",
        "seccomp",
        "sealed",
        "locked",
        "no-shared",
        "reload",
        "write",
        "patched",
        "killed",
        "paused",
        "crashed",
    ],
)
@pytest.mark.parametrize("is_logged", [False, True])
def test_a_program_does_what_it_does_with_the_original(
    kit: Kit, cut: Cut, what: str, is_logged: bool, tmp_path: Path
) -> None:
    original = kit.run(what, kit.library)
    assert original.returncode in (0, -signal.SIGSEGV), original
    assert kit.output in original.stdout or what in (
        "handler-needs-pages",
        "write",
        "patched",
    )
    logs = tmp_path / "logs"
    found = kit.run(what, cut.library, environ=logged(logs) if is_logged else {})
    assert logs.exists() == is_logged
    if what in ("no-shared", "mdwe") and is_logged and original.stdout == kit.output:
        # The log can't be mapped, or code that was hidden not be shown again.
        assert found.stderr.count("no log of what comes back to libraries can be written") == 1
        found.stderr = ""
    assert (found.returncode, found.stdout, found.stderr) == (
        original.returncode,
        original.stdout,
        original.stderr,
    )


@pytest.mark.parametrize("is_logged", [False, True])
def test_what_programs_do_with_signals(tmp_path: Path, is_logged: bool) -> None:
    """The program of the pages' tracer: each of its steps, on code that is in a spare."""
    program = compile_c("pages/program.c", tmp_path / "program")
    original = compile_shared("pages/library.c", tmp_path / "libpages.so")
    cut = cut_library(original, tmp_path / "cut.so", tmp_path, [], CutOptions(min_hole=4096))
    assert size(cut.holes) == 11 * 4096
    environ = {**os.environ, **(logged(tmp_path / "logs") if is_logged else {})}
    for path in (original, cut.library):
        assert subprocess.run([program, path], env=environ, check=False).returncode == 0


def test_the_spare_is_deleted_while_it_is_used(kit: Kit, tmp_path: Path) -> None:
    cut = kit.cut(tmp_path)
    done = kit.run("deleted", cut.library, str(cut.spare))
    assert (done.returncode, done.stdout) == (0, kit.output)
    assert not cut.spare.exists()


def test_the_first_process_of_a_container_is_sent_the_signal(
    kit: Kit, cut: Cut, tmp_path: Path
) -> None:
    """It lives on."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"]).returncode != 0:
        pytest.skip("this system forbids user and pid namespaces")
    for library in (kit.library, cut.library):
        command = [*unshare, str(kit.program), "killed-first", str(library), str(kit.pages)]
        for environ in ({}, logged(tmp_path / "logs")):
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, kit.output, "")


def test_the_last_descriptors(kit: Kit, cut: Cut) -> None:
    """The loader needs one to load a library, and the stub two: the spare, and its folder."""
    script = 'ulimit -n 5; exec "$0" plain "$1" "$2" 3<&- 4<&- 5<&-'
    command = ["bash", "-c", script, str(kit.program), str(cut.library), str(kit.pages)]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, kit.output, "")


@pytest.mark.slow
@pytest.mark.skipif(
    int(Path("/proc/sys/vm/max_map_count").read_text()) > 100_000, reason="takes too many mappings"
)
def test_a_process_with_all_mappings_that_it_may_have(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    assert kit.run("mappings", kit.library).stdout == kit.output
    assert kit.run("mappings", cut.library).stdout == kit.output
    # With a log, all pages become accessible at once.
    assert kit.run("mappings", cut.library, environ=logged(tmp_path)).stdout == kit.output


def test_a_library_without_its_spare_is_refused(kit: Kit, tmp_path: Path) -> None:
    cut = kit.cut(tmp_path, options=CutOptions(min_hole=4096, remedy="Help."))
    spare = cut.spare.rename(tmp_path / "away")
    done = kit.run("plain", cut.library)
    assert is_refused(done)
    assert done.stdout.endswith(f"{REFUSED}{cut.spare.name} lies in none of its folders. Help.\n")
    # Each dlopen is refused, nothing is left of it, and the spare may still come.
    code = f"""
import ctypes, os, sys
def fails():
    try:
        ctypes.CDLL(sys.argv[1])
    except OSError as e:
        return "Help." in str(e)
def mappings():
    return len(open("/proc/self/maps").readlines()), len(os.listdir("/proc/self/fd"))
# Python's own memory grows at first.
warm = [fails() for _ in range(300)]
before = mappings()
print(all(fails() for _ in range(300)), mappings() == before)
os.rename(sys.argv[2], sys.argv[3])
print(ctypes.CDLL(sys.argv[1]).sum(0, {kit.pages}))
"""
    words = [str(path) for path in (cut.library, spare, cut.spare)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (f"True True\n{kit.output.split()[1]}\n", "")


def test_a_program_whose_library_lacks_its_spare_does_not_start(tmp_path: Path) -> None:
    cut, program = compile_later(tmp_path)
    assert subprocess.run([program], check=False, capture_output=True).returncode == 0
    cut.spare.unlink()
    for environ in ({}, {"LD_BIND_NOW": "1"}):
        done = subprocess.run([program], env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (127, "")
        assert REFUSED in done.stderr


def test_a_spare_of_another_cut_is_refused(kit: Kit, tmp_path: Path) -> None:
    cut = kit.cut(tmp_path / "one")
    other = kit.cut(tmp_path / "other", [(0x2000, 0x8000)])
    assert other.spare.name != cut.spare.name
    shutil.copy(other.spare, cut.spare)
    done = kit.run("plain", cut.library)
    assert is_refused(done) and "is that of another library or of another cut" in done.stdout


@pytest.mark.planted_fault(
    "a named pipe lies at the place of a spare, which the load of a library would wait for",
    says="is that of another library",
)
def test_a_pipe_for_a_spare(kit: Kit, tmp_path: Path, fault: PlantedFault) -> None:
    cut = kit.cut(tmp_path)
    cut.spare.unlink()
    os.mkfifo(cut.spare)
    done = kit.run("plain", cut.library)
    assert is_refused(done)
    fault.check(done.stdout)


def test_the_spare_is_found_in_other_folders(kit: Kit, tmp_path: Path) -> None:
    folder = tmp_path / "layer"
    folder.mkdir()
    for number, options, environ in (
        (1, CutOptions(min_hole=4096, folders=("/nowhere", str(folder))), {}),
        (2, CutOptions(min_hole=4096), {"NEGATIVA_SPARE_DIR": str(folder)}),
    ):
        cut = kit.cut(tmp_path / str(number), options=options)
        cut.spare.rename(folder / cut.spare.name)
        assert kit.run("plain", cut.library, environ=environ).stdout == kit.output


def test_another_librarys_constructor_calls_a_cut_library(tmp_path: Path) -> None:
    """Before the cut one has started: both have a function of that name."""
    cut, program = compile_later(tmp_path)
    assert size(cut.holes) >= 4096
    script = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).call_result())"
    command = [sys.executable, "-I", "-c", script, str(cut.library)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "42\n"
    # At a program's start, too: before libc has the environment, which it gets all the same.
    (tmp_path / "logs").mkdir()
    for environ in ({}, logged(tmp_path / "logs")):
        environ = {**environ, "SETTING": "value"}
        done = subprocess.run([program], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout == "42 value of program\n"
    assert len(list((tmp_path / "logs").iterdir())) == 1


def run_with_spare_on_noexec(
    kit: Kit, tmp_path: Path, what: str
) -> subprocess.CompletedProcess[str]:
    mount = tmp_path / "mount"
    mount.mkdir()
    options = CutOptions(min_hole=4096, folders=(str(mount),), remedy="Help.")
    cut = kit.cut(tmp_path / "cut", options=options)
    script = (
        f"mount -t tmpfs -o noexec,mode=755 tmpfs '{mount}' && mv '{cut.spare}' '{mount}' && "
        f"exec '{kit.program}' {what} '{cut.library}' {kit.pages}"
    )
    command = ["unshare", "-m", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not may_mount(), reason="needs to mount file systems")
def test_a_spare_on_a_file_system_mounted_noexec(kit: Kit, tmp_path: Path) -> None:
    done = run_with_spare_on_noexec(kit, tmp_path, "plain")
    assert (done.returncode, done.stdout, done.stderr) == (0, kit.output, "")


@pytest.mark.skipif(not may_mount(), reason="needs to mount file systems")
@pytest.mark.planted_fault(
    "the system allows no new executable memory, and the spare's file system is mounted noexec",
    says="lies where no code may run",
)
def test_noexec_and_no_new_executable_memory(kit: Kit, tmp_path: Path, fault: PlantedFault) -> None:
    done = run_with_spare_on_noexec(kit, tmp_path, "mdwe")
    if "no MDWE" in done.stdout:
        pytest.skip("needs Linux 6.3")
    assert is_refused(done) and "Help." in done.stdout
    fault.check(done.stdout)


@pytest.mark.skipif(not may_mount(), reason="needs to mount file systems")
def test_noexec_and_a_filter_of_system_calls_after_the_load(kit: Kit, tmp_path: Path) -> None:
    assert run_with_spare_on_noexec(kit, tmp_path, "seccomp").stdout == kit.output


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_another_user_without_rights(kit: Kit) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(kit.program, folder)
        cut = kit.cut(Path(folder) / "cut")
        done = subprocess.run(
            [program, "plain", cut.library, str(kit.pages)],
            env={},
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, kit.output)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.planted_fault("another user puts a spare into the folder", says="is not trusted")
def test_a_spare_of_another_user(kit: Kit, tmp_path: Path, fault: PlantedFault) -> None:
    cut = kit.cut(tmp_path / "cut")
    os.chown(cut.spare, 65533, 65533)
    done = kit.run("plain", cut.library)
    assert is_refused(done)
    fault.check(done.stdout)
    # The variable names a place, and no more: a server's title may be written over it.
    environ = {"NEGATIVA_SPARE_DIR": str(cut.spare.parent)}
    assert is_refused(kit.run("plain", cut.library, environ=environ))
    os.chown(cut.library, 65533, 65533)
    assert kit.run("plain", cut.library).stdout == kit.output


@pytest.mark.parametrize("place", ["named", "by variable", "beside"])
@pytest.mark.planted_fault(
    "others may write to a spare or to its folder", says="may write to it or to its folder"
)
def test_a_spare_that_others_may_write_to(
    kit: Kit, tmp_path: Path, fault: PlantedFault, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = tmp_path / "spares"
    folder.mkdir()
    options = CutOptions(min_hole=4096, folders=(str(folder),) if place == "named" else ())
    cut = kit.cut(tmp_path / "cut", options=options)
    environ = {"NEGATIVA_SPARE_DIR": str(folder)} if place == "by variable" else {}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    spare = cut.spare
    if place != "beside":
        spare = cut.spare.replace(folder / cut.spare.name)

    said: list[str] = []

    def works() -> bool:
        done = kit.run("plain", cut.library, environ=environ)
        assert (problem_of(cut.library) is None) is (done.returncode == 0)
        if done.returncode == 0:
            return done.stdout == kit.output
        assert is_refused(done)
        said.append(done.stdout)
        return False

    def is_used_with(path: Path, mode: int) -> bool:
        before = path.stat().st_mode
        path.chmod(mode)
        try:
            return works()
        finally:
            path.chmod(before)

    assert works()
    assert not is_used_with(spare, 0o664) and not is_used_with(spare, 0o646)
    # Who can write beside the library can exchange it, too; with the sticky bit only add to it.
    is_beside = place == "beside"
    assert is_used_with(spare.parent, 0o775) == is_used_with(spare.parent, 0o757) == is_beside
    assert not is_used_with(spare.parent, 0o1777)
    fault.check(said[0])
    cut.library.chmod(0o777)
    assert is_used_with(spare, 0o666) is is_beside
    cut.library.chmod(0o755)
    moved = spare.rename(tmp_path / "elsewhere")
    spare.symlink_to(moved)
    assert not works()
    spare.unlink()
    os.link(moved, spare)
    assert works()
    # The way there may have links.
    if place != "beside":
        folder.rename(tmp_path / "real")
        folder.symlink_to("real")
        assert works()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_folder_of_another_user(kit: Kit, tmp_path: Path) -> None:
    folder = tmp_path / "spares"
    folder.mkdir()
    cut = kit.cut(tmp_path / "cut", options=CutOptions(min_hole=4096, folders=(str(folder),)))
    cut.spare.replace(folder / cut.spare.name)
    os.chown(folder, 65533, 65533)
    assert is_refused(kit.run("plain", cut.library))
    os.chown(cut.library, 65533, 65533)
    assert kit.run("plain", cut.library).stdout == kit.output


@pytest.mark.slow
def test_hundreds_of_libraries_in_a_process(tmp_path: Path) -> None:
    original = compile_shared("pages/library.c", tmp_path / "libpages.so")
    data = original.read_bytes()
    libraries = []
    for number in range(300):
        # Another file: the compiler's name is no part of what is loaded.
        original.write_bytes(data.replace(b"GCC: ", b"%05d" % number, 1))
        libraries.append(tmp_path / f"lib{number}.so")
        cut_library(original, libraries[-1], tmp_path, [], CutOptions(min_hole=4096))
    script = (
        "import ctypes, sys\n"
        "for path in sys.argv[1:]:\n"
        "    library = ctypes.CDLL(path)\n"
        "    library.never()\n"
        "print('done')\n"
    )
    command = [sys.executable, "-I", "-c", script, *map(str, libraries)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_the_kernel_joins_neighbours(tmp_path: Path) -> None:
    """Constants and GPU code among them have rows of their own, and cost one mapping."""
    library = compile_shared("pages/constants.c", tmp_path / "libconstants.so")
    with library.open("rb") as file:
        constants = ELFFile(file).get_section_by_name(".rodata")
        assert constants is not None
        start = constants["sh_offset"]
    code = (start + (1 << 20), start + (2 << 20))
    made = cut_library(library, tmp_path / "lib.so", tmp_path, [], containers=[code])
    with ByteSource(made.library) as source:
        note = read_note(source)
    assert note is not None
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    command = [sys.executable, "-c", script, str(made.library)]
    maps = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert maps.count(note.spare_name) == note.mappings == len(note.holes) - 2
