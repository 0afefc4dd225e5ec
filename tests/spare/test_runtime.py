"""Processes use libraries whose pages lie in a spare: every result is the original's.

The kernel brings the pages in, or the handler of page faults does, which logs them.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.hostcode.functions import named_functions
from pytest_negativa.rewriting.compact.cut import Cut, CutOptions, cut_library
from pytest_negativa.slimming.spares import problem_of
from pytest_negativa.spare.misses import read_misses
from pytest_negativa.spare.note import MAGIC
from tests.support.compiling import compile_c, compile_shared
from tests.support.cutting import (
    OPTIONS,
    Kit,
    build_kit,
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
        "handler-sets-itself",
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
        "no-shared",
        "reload",
        "write",
        "patched",
        "killed",
        "paused",
        "crashed",
    ],
)
@pytest.mark.parametrize("by_handler", [False, True])
def test_a_program_does_what_it_does_with_the_original(
    kit: Kit, cut: Cut, what: str, by_handler: bool, tmp_path: Path
) -> None:
    original = kit.run(what, kit.library)
    assert original.returncode in (0, -signal.SIGSEGV), original
    assert kit.output in original.stdout or what in (
        "handler-needs-pages",
        "write",
        "patched",
    )
    logs = tmp_path / "logs"
    found = kit.run(what, cut.library, environ=logged(logs) if by_handler else {})
    assert logs.exists() == by_handler
    if what == "no-shared" and by_handler:
        # Nor can the log be mapped.
        assert "no log can be written here" in found.stderr
        found.stderr = ""
    assert (found.returncode, found.stdout, found.stderr) == (
        original.returncode,
        original.stdout,
        original.stderr,
    )


@pytest.mark.parametrize("by_handler", [False, True])
def test_what_programs_do_with_signals(tmp_path: Path, by_handler: bool) -> None:
    """The program of the pages' tracer: each of its steps, on code that is in a spare."""
    program = compile_c("pages/program.c", tmp_path / "program")
    original = compile_shared("pages/library.c", tmp_path / "libpages.so")
    cut = cut_library(original, tmp_path / "cut.so", tmp_path, [], CutOptions(min_hole=4096))
    assert cut.removed == 11 * 4096
    environ = {**os.environ, **(logged(tmp_path / "logs") if by_handler else {})}
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
    """It lives on, and so does the handler."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"]).returncode != 0:
        pytest.skip("this system forbids user and pid namespaces")
    for library in (kit.library, cut.library):
        command = [*unshare, str(kit.program), "killed-first", str(library), str(kit.pages)]
        for environ in ({}, logged(tmp_path / "logs")):
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, kit.output, "")


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


def test_the_last_descriptors(kit: Kit, cut: Cut) -> None:
    """The loader needs one to load a library, and the stub two: the spare, and its folder."""
    script = 'ulimit -n 5; exec "$0" plain "$1" "$2" 3<&- 4<&- 5<&-'
    command = ["bash", "-c", script, str(kit.program), str(cut.library), str(kit.pages)]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, kit.output, "")


def test_a_missing_spare_is_told_once_by_the_handler(kit: Kit, tmp_path: Path) -> None:
    cut = kit.cut(tmp_path)
    cut.spare.unlink()
    done = kit.run("plain", cut.library, environ=logged(tmp_path / "logs"))
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.count("negativa:") == 1
    assert f"negativa: {cut.library}: code at offset 0x" in done.stderr
    assert f"its spare {cut.spare.name} can't be used" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    int(Path("/proc/sys/vm/max_map_count").read_text()) > 100_000, reason="takes too many mappings"
)
def test_a_process_with_all_mappings_that_it_may_have(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    assert kit.run("mappings", kit.library).stdout == kit.output
    assert kit.run("mappings", cut.library).stdout == kit.output
    done = kit.run("mappings", cut.library, environ=logged(tmp_path))
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "")
    assert done.stderr.count("negativa:") == 1
    assert f"{cut.library}: the system refuses to map a page of its spare" in done.stderr
    assert "as many mappings as vm.max_map_count allows" in done.stderr


def test_a_system_that_wipes_no_memory_on_fork(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    shim = compile_shared("spare/no_wipe.c", tmp_path / "libno_wipe.so")
    environ = logged(tmp_path / "logs")
    environ["LD_PRELOAD"] += f":{shim}"
    done = kit.run("plain", cut.library, environ=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, kit.output, "")


@pytest.mark.parametrize("style", ["gnu", "sysv"])
def test_a_missing_function_is_told_by_name(tmp_path: Path, style: str) -> None:
    original = compile_shared(
        "pages/library.c", tmp_path / "libpages.so", f"-Wl,--hash-style={style}"
    )
    with ByteSource(original) as source:
        # Code lies at its address in the file.
        never = next(at for at, (_, name) in named_functions(source) if name == b"never")
    others = [(0, never), (never + 4096, original.stat().st_size)]
    cut = cut_library(original, tmp_path / "cut.so", tmp_path, others, OPTIONS)
    cut.spare.unlink()
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).never()"
    environ = logged(tmp_path / "logs")
    command = [sys.executable, "-I", "-c", script, str(cut.library)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert f"{cut.library}: code of never at offset {never:#x} of the original" in done.stderr
    # The process dies, and its log tells what it needed.
    [log] = (tmp_path / "logs").iterdir()
    assert read_misses(log).ranges() == ((never, never + 4096),)


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
fails()
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
    assert cut.removed >= 4096
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


def test_the_log_counts_pages_and_a_full_disk_does_no_harm(kit: Kit, tmp_path: Path) -> None:
    cut = kit.cut(tmp_path / "cut")
    kit = dataclasses.replace(kit, pages=kit.pages // 2)
    logs = tmp_path / "logs"
    for _ in range(2):
        assert kit.run("plain", cut.library, environ=logged(logs)).stdout
    (log,) = logs.iterdir()
    misses = read_misses(log)
    assert (misses.name, misses.original_size) == (cut.library.name, cut.size_before)
    assert misses.original.hex() == cut.original_sha256
    # Each of the two processes brought each page of code back once.
    counts = [miss.times for miss in misses.pages.values()]
    assert counts.count(2) >= kit.pages and set(counts) == {2}
    # The log is the next trace: what it names stays, and nothing is missed any more.
    again = kit.cut(tmp_path / "again", misses.ranges())
    log.unlink()
    assert kit.run("plain", again.library, environ=logged(logs)).stdout
    assert not any(read_misses(log).pages for log in logs.iterdir())
    nowhere = logged("/dev/full")
    assert kit.run("plain", cut.library, environ=nowhere).stdout == kit.output


def test_a_limit_on_file_sizes_kills_nobody(kit: Kit, cut: Cut, tmp_path: Path) -> None:
    command = f'ulimit -f 0; exec "{kit.program}" plain "{cut.library}" {kit.pages}'
    environ = logged(tmp_path)
    done = subprocess.run(["sh", "-c", command], env=environ, capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode()) == (0, kit.output)
    assert f"negativa: {tmp_path}: no log can be written here" in done.stderr.decode()


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


@pytest.mark.planted_fault(
    "a cut library's table of gaps is damaged", says="table of missing pages is damaged"
)
def test_a_damaged_table_is_refused(kit: Kit, tmp_path: Path, fault: PlantedFault) -> None:
    cut = kit.cut(tmp_path)
    data = bytearray(cut.library.read_bytes())
    # The number of holes: note.py tells the format.
    struct.pack_into("<I", data, data.index(MAGIC) + 100, 1 << 20)
    cut.library.write_bytes(data)
    done = kit.run("plain", cut.library, environ=logged(tmp_path / "logs"))
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "")
    fault.check(done.stderr)


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


@pytest.mark.slow
def test_thousands_of_misses_bring_back_more_at_once(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    kit = build_kit(tmp_path_factory.mktemp("many"), pages=6000)
    cut = kit.cut(tmp_path)
    for what in ("threads", "plain"):
        logs = tmp_path / what
        done = kit.run(what, cut.library, environ=logged(logs))
        assert (done.returncode, done.stdout) == (0, kit.output)
    # What the program patched stays.
    assert kit.run("patched", cut.library).stdout == kit.run("patched", kit.library).stdout
    (log,) = logs.iterdir()
    pages = read_misses(log).pages
    # What came back beside others is in the log, too: it may have been needed.
    assert sum(miss.times > 0 for miss in pages.values()) < 2100 < 6000 <= len(pages)
