"""Copies in place of originals, in real processes, with libraries and programs compiled here."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_negativa.errors import NegativaError
from pytest_negativa.pages.auditors import MACHINES, watch_environment
from pytest_negativa.pages.page_logs import read_page_logs
from pytest_negativa.processes.redirect import (
    REDIRECT,
    RedirectedProcess,
    copy_path,
    read_logs,
    redirect_environment,
    why_not_replaceable,
    why_unsupported,
    write_table,
)
from pytest_negativa.storage.shared_folders import make_logs_folder
from tests.support.compiling import compile_c, needs_compiler
from tests.support.emulators import not_in_qemu
from tests.support.faults import PlantedFault
from tests.support.paged import needs_page_watch

pytestmark = needs_compiler


def compile_value(target: Path, symbol: str, value: int) -> Path:
    flags = ("-shared", "-fPIC", f"-DSYMBOL={symbol}", f"-DVALUE={value}")
    return compile_c("redirect/value.c", target, *flags, f"-Wl,-soname,{target.name}")


def compile_library(target: Path, which: str, near: Path, far: Path) -> Path:
    # The folder that holds only libfar.so comes first: libnear.so is looked for there in vain.
    return compile_c(
        "redirect/library.c",
        target,
        *("-shared", "-fPIC", f'-DWHICH="{which}"', "-Wl,-soname,liblib.so.1"),
        *(str(near), str(far), "-Wl,--enable-new-dtags,-rpath,$ORIGIN/../far:$ORIGIN"),
    )


@dataclass
class Stage:
    """Programs, libraries and what stays of the processes of one test."""

    folder: Path
    lib: Path
    near: Path
    far: Path
    other: Path
    loader: Path
    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def table(self) -> Path:
        return self.folder / "table"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def redirect(self, *originals: Path, environ: Mapping[str, str] = os.environ) -> None:
        self.logs.mkdir(exist_ok=True)
        write_table(self.table, self.root, originals or (self.lib,))
        self.environment = {**environ, **redirect_environment(environ, self.table, self.logs)}

    def run(self, *arguments: str | Path, code: int = 0, **environ: str) -> list[str]:
        """Lines that a process prints."""
        done = subprocess.run(
            [*map(str, arguments)],
            env={**self.environment, **environ},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (code, "")
        return done.stdout.splitlines()

    def load(self, *arguments: str | Path, code: int = 0, **environ: str) -> list[str]:
        return self.run(self.loader, *arguments, code=code, **environ)

    def only(self, executable: Path | None = None) -> RedirectedProcess:
        """The one process that ran; its log has no problem."""
        (process,) = (
            p for p in read_logs(self.logs) if p.executable == str(executable or self.loader)
        )
        assert process.problems == ()
        return process


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("redirect").resolve()
    near = compile_value(folder / "a/libnear.so", "near_symbol", 1)
    far = compile_value(folder / "far/libfar.so", "far_symbol", 2)
    compile_library(folder / "a/liblib.so.1", "original", near, far)
    compile_library(folder / "copy.so", "copy", near, far)
    compile_library(folder / "stale.so", "stale", near, far)
    compile_c("redirect/loader.c", folder / "loader")
    return folder


@pytest.fixture
def stage(built: Path, tmp_path: Path) -> Stage:
    """A copy of liblib.so.1 in the mirror, and nothing else there."""
    folder = tmp_path.resolve()
    for name in ("a", "far", "loader"):
        copy = shutil.copytree if (built / name).is_dir() else shutil.copy
        copy(built / name, folder / name)
    stage = Stage(
        folder,
        lib=folder / "a/liblib.so.1",
        near=folder / "a/libnear.so",
        far=folder / "far/libfar.so",
        other=folder / "b",
        loader=folder / "loader",
        root=folder / "mirror",
    )
    place(stage, built / "copy.so", stage.lib)
    stage.other.mkdir()
    stage.redirect()
    return stage


def place(stage: Stage, file: Path, original: Path) -> Path:
    target = Path(copy_path(stage.root, original))
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)
    return target


def assert_copy(stage: Stage, executable: Path | None = None) -> None:
    process = stage.only(executable)
    assert process.copies == {str(stage.lib)}
    assert process.originals == frozenset()


def assert_original(stage: Stage, opened_by: str | Path) -> None:
    process = stage.only()
    assert process.copies == frozenset()
    assert process.originals == {(str(stage.lib), str(opened_by))}


def unshare() -> list[str]:
    """A command that runs another where mounts are its own."""
    command = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    if not shutil.which("unshare") or subprocess.run([*command, "true"]).returncode != 0:
        pytest.skip("mounting is not permitted")
    return command


# ---- Ways to load it, all of which lead to the copy ----


@pytest.mark.parametrize(
    "path",
    ["-Wl,-rpath,$ORIGIN/../a", "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../a:$ORIGIN/../far"],
    ids=["runpath", "rpath"],
)
def test_a_linked_program_gets_the_copy(stage: Stage, path: str) -> None:
    program = compile_c("redirect/linked.c", stage.folder / "bin/linked", str(stage.lib), path)
    assert stage.run(program) == ["copy"]
    assert_copy(stage, program)


@pytest.mark.parametrize(
    ("words", "search"),
    [
        ("open {lib}", None),
        ("cd {lib.parent} open ../a/./liblib.so.1", None),
        ("open liblib.so.1", "{lib.parent}"),
        # The loader takes its search path when it starts, the files when they are looked for.
        *(("cd {lib.parent} open liblib.so.1", f"{path}:/nowhere") for path in ("", ".", "../a")),
        ("namespace liblib.so.1", "{lib.parent}"),
        # realpath of /proc/self/fd/N is the original's path.
        ("descriptor {lib}", None),
        # A thread that is to be cancelled, a process whose first thread has ended, a small stack.
        *((f"{words} {{lib}}", None) for words in ("cancel", "leave open", "small")),
    ],
)
def test_ways_to_open_it(stage: Stage, words: str, search: str | None) -> None:
    if search is not None:
        stage.environment["LD_LIBRARY_PATH"] = search.format(lib=stage.lib)
    assert stage.load(*words.format(lib=stage.lib).split()) == ["copy"]
    assert_copy(stage)


def test_preloaded(stage: Stage) -> None:
    stage.load(LD_PRELOAD=str(stage.lib))
    assert_copy(stage)


def test_symbolic_links(stage: Stage) -> None:
    (stage.other / "liblib.so").symlink_to("../a/liblib.so.1")
    (stage.folder / "c").symlink_to("b")
    assert stage.load("open", stage.folder / "c/liblib.so") == ["copy"]
    path = f"{stage.other}:{stage.near.parent}:{stage.far.parent}"
    assert stage.load("open", "liblib.so", LD_LIBRARY_PATH=path) == ["copy"]
    assert [p.copies for p in read_logs(stage.logs)] == [{str(stage.lib)}] * 2


def test_hard_links_lead_to_one_copy(stage: Stage) -> None:
    """The loader maps a file once, whatever its names; the table may have one of them or more."""
    hard = stage.lib.with_name("hard.so")
    hard.hardlink_to(stage.lib)
    twice = ("open", hard, "path", "open", stage.lib, "path")
    assert stage.load(*twice) == ["copy", str(hard)] * 2
    assert_copy(stage)

    for log in stage.logs.iterdir():
        log.unlink()
    place(stage, Path(copy_path(stage.root, stage.lib)), hard)
    stage.redirect(stage.lib, hard)
    assert stage.load(*twice) == ["copy", str(hard)] * 2
    process = stage.only()
    assert process.copies == {str(hard)} and not process.originals


def test_one_copy_for_all_names(stage: Stage) -> None:
    """The loader must not map it twice, whichever name comes first."""
    lines = stage.load(
        *("open", stage.lib, "open", "liblib.so.1", "open", copy_path(stage.root, stage.lib)),
        LD_LIBRARY_PATH=str(stage.lib.parent),
    )
    assert lines == ["copy"] * 3
    (log,) = stage.logs.iterdir()
    assert log.read_text().count("\0copy\0") == 1


def test_a_path_in_another_namespace_is_seen(stage: Stage) -> None:
    """glibc doesn't ask the auditor for it; what was mapped is in the log."""
    path = f"{stage.near.parent}:{stage.far.parent}"
    assert stage.load("namespace", stage.lib, LD_LIBRARY_PATH=path) == ["original"]
    assert_original(stage, stage.lib)


def test_origin_in_a_name(stage: Stage) -> None:
    """The program's own $ORIGIN, which the loader replaces only after it asked."""
    shutil.copy(stage.loader, stage.lib.parent / "loader")
    stage.loader = stage.lib.parent / "loader"
    assert stage.load("open", "$ORIGIN/liblib.so.1", "open", "${ORIGIN}/libnear.so") == [
        "copy",
        "opened",
    ]
    assert_copy(stage)


# ---- What the copy finds ----


def test_the_copy_finds_the_neighbours_of_the_original(stage: Stage) -> None:
    """libnear.so and libfar.so were found, or there would be no line at all; and again by hand."""
    assert stage.load(
        *("open", stage.lib, "path", "beside", "libnear.so", "token", "$ORIGIN/../far/libfar.so"),
        *("token", "libfar.so", "beside", "missing.so"),
    ) == [
        *("copy", str(stage.lib), "opened", "opened", "opened"),
        f"failed: {stage.near.with_name('missing.so')}: cannot open shared object file: "
        "No such file or directory",
    ]
    assert_copy(stage)


@needs_page_watch
def test_a_trace_of_cpu_code_knows_the_neighbours_by_their_files(stage: Stage) -> None:
    """The loader knows them by names in the mirror, where there are no such files."""
    logs = stage.folder / "pages"
    logs.mkdir()
    stage.environment |= watch_environment(stage.environment, logs)
    stage.load("open", stage.lib, "token", "$ORIGIN/../far/libfar.so")
    (process,) = read_page_logs(logs)
    paths = {library.file.path for library in process.libraries}
    assert {str(stage.near), str(stage.far)} <= paths


def test_the_copy_finds_data_beside_the_original(stage: Stage) -> None:
    """By the folder that dladdr tells; in the mirror there is no such file."""
    stage.lib.with_name("data.bin").touch()
    assert stage.load("open", stage.lib, "data", "data.bin") == ["copy", "read"]
    assert_copy(stage)


@pytest.mark.parametrize("relative", [False, True])
def test_beside_a_link_to_the_original_it_finds_what_the_original_did(
    stage: Stage, built: Path, relative: bool
) -> None:
    """Installers link single files, of one folder each: what stands beside the link counts."""
    store = stage.folder / "store/deep"
    store.mkdir(parents=True)
    stored = Path(shutil.move(stage.lib, store))
    stage.lib.symlink_to(stored)
    shutil.rmtree(stage.root)
    place(stage, built / "copy.so", stored)
    stage.redirect(stored)
    name = "../a/liblib.so.1" if relative else stage.lib
    assert stage.load("cd", stage.other, "open", name, "beside", "libnear.so") == ["copy", "opened"]
    assert stage.only().copies == {str(stored)}


def test_found_by_search_it_keeps_its_path(stage: Stage) -> None:
    lines = stage.load("open", "liblib.so.1", "path", LD_LIBRARY_PATH=str(stage.lib.parent))
    assert lines == ["copy", str(stage.lib)]


def test_copies_find_copies(stage: Stage) -> None:
    place(stage, stage.near, stage.near)
    place(stage, stage.far, stage.far)
    stage.redirect(stage.lib, stage.near, stage.far)
    assert stage.load("open", stage.lib) == ["copy"]
    assert stage.only().copies == {str(stage.lib), str(stage.near), str(stage.far)}
    assert stage.only().originals == frozenset()


def test_what_an_earlier_run_left_is_not_loaded(stage: Stage, built: Path) -> None:
    stale = place(stage, built / "stale.so", stage.near)
    assert stage.load("open", stage.lib, "open", stale) == ["copy", "opened"]
    assert_copy(stage)


def test_files_that_are_not_in_the_table_are_left_alone(stage: Stage, built: Path) -> None:
    other = Path(shutil.copy(built / "stale.so", stage.other / "liblib.so.1"))
    shutil.copytree(stage.folder / "far", stage.other / "far")
    shutil.copy(stage.near, stage.other)
    assert stage.load("open", other) == ["stale"]
    assert stage.only().lines == ()


def test_a_name_that_leaves_the_root_is_not_of_the_root(stage: Stage) -> None:
    name = f"{stage.root}/../nowhere/liblib.so.1"
    assert stage.load("open", name) == [
        f"failed: {name}: cannot open shared object file: No such file or directory"
    ]


# ---- Processes ----


def test_forked_and_executed_children(stage: Stage) -> None:
    assert stage.load("fork", "open", stage.lib) == ["copy"]
    process = stage.only()
    (line,) = process.lines
    assert line.pid != process.pid and process.copies == {str(stage.lib)}
    assert stage.load("fork", "exec", stage.loader, "open", stage.lib) == ["copy"]
    _, parent, child = read_logs(stage.logs)
    assert parent.lines == () and child.copies == {str(stage.lib)}


def test_python_and_its_children(stage: Stage) -> None:
    code = f"""
import ctypes, multiprocessing, os, subprocess, sys
def load():
    library = ctypes.CDLL({str(stage.lib)!r})
    library.which.restype = ctypes.c_char_p
    print(library.which().decode(), flush=True)
if __name__ == "__main__":
    os.environ.pop("NEGATIVA_REDIRECT_TABLE")  # this process has it already
    os.environ["NEGATIVA_REDIRECT_TABLE"] = {str(stage.table)!r}
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=load)
        process.start()
        process.join()
        assert process.exitcode == 0
    subprocess.run([{str(stage.loader)!r}, "open", {str(stage.lib)!r}], check=True)
    load()
"""
    script = stage.folder / "script.py"
    script.write_text(code)
    assert stage.run(sys.executable, "-W", "ignore", script) == ["copy"] * 5
    processes = read_logs(stage.logs)
    lines = [line for process in processes for line in process.lines]
    assert [(line.kind, line.path) for line in lines] == [("copy", str(stage.lib))] * 5
    assert len({line.pid for line in lines}) == 5
    assert not any(p.problems for p in processes)


def test_a_cleared_environment_matters_to_children_only(stage: Stage) -> None:
    lines = stage.load(
        *("clear", "open", stage.lib, "fork", "exec", stage.loader, "open", stage.lib)
    )
    assert lines == ["copy", "original"]
    assert_copy(stage)


def test_the_audit_variable_alone_does_nothing(stage: Stage) -> None:
    stage.environment = {"LD_AUDIT": stage.environment["LD_AUDIT"]}
    assert stage.load("open", stage.lib) == ["original"]


def test_many_processes_at_once(stage: Stage) -> None:
    command = [str(stage.loader), "open", str(stage.lib), "fork", "open", "liblib.so.1"]
    running = [
        subprocess.Popen(command, env=stage.environment, stdout=subprocess.PIPE) for _ in range(8)
    ]
    assert {process.communicate()[0] for process in running} == {b"copy\ncopy\n"}
    processes = read_logs(stage.logs)
    assert {p.pid for p in processes} == {p.pid for p in running}
    assert {p.copies for p in processes} == {frozenset({str(stage.lib)})}


def test_a_killed_process_leaves_all_it_did(stage: Stage) -> None:
    assert stage.load("open", stage.lib, "kill", code=-signal.SIGKILL) == ["copy"]
    assert_copy(stage)


def test_closed_descriptors_are_not_missed(stage: Stage) -> None:
    """The log is never held open, so a program that closes all and opens its own is safe."""
    lines = stage.load("close", "open", stage.lib)
    assert lines == ["345678", "copy"]
    assert_copy(stage)


# ---- The original, behind the redirect's back ----


def test_a_descriptor_of_a_hard_link_is_taken_to_the_copy(stage: Stage) -> None:
    link = stage.lib.with_name("hard.so")
    link.hardlink_to(stage.lib)
    assert stage.load("descriptor", link) == ["copy"]
    assert_copy(stage)


def test_a_file_without_a_name_is_seen(stage: Stage) -> None:
    link = stage.lib.with_name("hard.so")
    link.hardlink_to(stage.lib)
    lines = stage.load("unlinked", link, LD_LIBRARY_PATH=f"{stage.near.parent}:{stage.far.parent}")
    assert lines == ["original"]
    assert_original(stage, "/proc/self/fd/3")


def test_what_was_never_a_file_of_the_table_is_not_logged(stage: Stage) -> None:
    assert stage.load("memory", stage.near) == ["opened"]
    assert stage.only().lines == ()


def test_a_replaced_original_is_seen(stage: Stage, built: Path) -> None:
    """As when a test installs another version: its copy is of other bytes."""
    new = Path(shutil.copy(built / "stale.so", stage.lib.with_name("new")))
    new.replace(stage.lib)
    assert stage.load("open", stage.lib) == ["stale"]
    assert_original(stage, stage.lib)


def test_a_copy_that_is_gone(stage: Stage, built: Path) -> None:
    """The process goes on with the original; another file in the copy's place is no copy."""
    copy = Path(copy_path(stage.root, stage.lib))
    # It keeps its inode, which the other file might get.
    copy.rename(copy.with_name("elsewhere"))
    assert stage.load("open", stage.lib) == ["original"]
    assert_original(stage, stage.lib)
    shutil.copy(built / "stale.so", copy)
    assert stage.load("open", stage.lib) == ["original"]


def test_a_bind_mount_is_taken_to_the_copy(stage: Stage) -> None:
    script = (
        f"mount --bind {stage.lib.parent} {stage.other} && "
        f"exec {stage.loader} open {stage.other}/liblib.so.1"
    )
    assert stage.run(*unshare(), "sh", "-c", script) == ["copy"]
    assert_copy(stage)


def test_on_an_overlay_file_system(stage: Stage) -> None:
    """As in a container: there the kernel's mappings name another device than stat does."""
    link = stage.lib.with_name("hard.so")
    link.hardlink_to(stage.lib)
    code = f"""
import os
from pathlib import Path
from pytest_negativa.processes.redirect import write_table
write_table(Path({str(stage.table)!r}), {str(stage.root)!r}, [{str(stage.lib)!r}])
os.execv({str(stage.loader)!r}, ["loader", "open", {str(stage.lib)!r}, "unlinked", {str(link)!r}])
"""
    layers = f"lowerdir={stage.lib.parent},upperdir={stage.other}/up,workdir={stage.other}/work"
    script = (
        f"mount -t tmpfs none {stage.other} && mkdir {stage.other}/up {stage.other}/work && "
        f'mount -t overlay -o {layers} none {stage.lib.parent} && exec {sys.executable} -c "$code"'
    )
    path = f"{stage.near.parent}:{stage.far.parent}"
    environment = {**stage.environment, "LD_LIBRARY_PATH": path, "code": code}
    done = subprocess.run(
        [*unshare(), "sh", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
    )
    if "mount:" in done.stderr:
        pytest.skip("overlays can't be mounted")
    assert (done.stdout.splitlines(), done.stderr) == (["copy", "original"], "")
    process = stage.only()
    assert process.copies == {str(stage.lib)}
    assert process.originals == {(str(stage.lib), "/proc/self/fd/3")}


def test_without_proc_it_is_unknown_what_was_mapped(stage: Stage) -> None:
    script = f"umount -l /proc && exec {stage.loader} open liblib.so.1 open {stage.near}"
    lines = stage.run(*unshare(), "sh", "-c", script, LD_LIBRARY_PATH=str(stage.lib.parent))
    assert lines == ["copy", "opened"]
    (process,) = (p for p in read_logs(stage.logs) if p.executable == str(stage.loader))
    assert process.problems == (f"{stage.lib} can't be told from its copy",)
    assert process.copies == frozenset()
    assert process.originals == frozenset()


def test_in_a_changed_root_the_process_runs_on(stage: Stage) -> None:
    """Its log is out of reach: this is what the redirect does not see."""
    if os.getuid() != 0:
        pytest.skip("needs chroot")
    for folder in (stage.lib.parent, stage.far.parent):
        shutil.copytree(folder, stage.folder / f"new{folder}")
    path = f"{stage.near.parent}:{stage.far.parent}"
    lines = stage.load("chroot", stage.folder / "new", "open", stage.near, LD_LIBRARY_PATH=path)
    assert lines == ["opened"]
    assert stage.only().lines == ()


# ---- Logs ----


def test_a_process_without_a_log_folder_runs(stage: Stage) -> None:
    stage.logs.rmdir()
    assert stage.load("open", stage.lib) == ["copy"]
    assert not stage.logs.exists()


def test_an_original_that_no_log_would_tell_of_is_not_loaded(stage: Stage) -> None:
    """Else the copy would be called proved, and nothing would show that it never ran."""
    link = stage.lib.with_name("hard.so")
    link.hardlink_to(stage.lib)
    Path(copy_path(stage.root, stage.lib)).unlink()
    stage.logs.rmdir()
    reason = "(negativa: on the original, and no log of it can be written)"
    gone = f"{reason}: cannot open shared object file: No such file or directory"
    lines = stage.load("open", stage.lib, "open", link, "open", stage.near)
    assert lines == [f"failed: {stage.lib} {gone}", f"failed: {link} {gone}", "opened"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process as another user")
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_process_of_another_user(built: Path, umask: int) -> None:
    # pytest's own temporary folders are closed to others.
    with tempfile.TemporaryDirectory(prefix="negativa-") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        for part in ("a", "far"):
            shutil.copytree(built / part, folder / part)
        loader = Path(shutil.copy(built / "loader", folder))
        lib, base = folder / "a/liblib.so.1", folder / "runs"
        before = os.umask(umask)
        try:
            logs, table = base / "run/verify/redirect", base / "run/verify/table"
            copy = Path(copy_path(base / "copies", lib))
            copy.parent.mkdir(parents=True)
            shutil.copy(built / "copy.so", copy)
            copy.chmod(0o755)  # as the original
            write_table(table, base / "copies", [lib])
            make_logs_folder(logs, base)
        finally:
            os.umask(before)
        environ = {**os.environ, **redirect_environment(os.environ, table, logs)}
        # The package's own folder may be closed to others.
        auditor = shutil.copy(str(REDIRECT), folder)
        environ["LD_AUDIT"] = environ["LD_AUDIT"].replace(str(REDIRECT), str(auditor))
        # That user can't make the folders in which the copy looks for its neighbours.
        environ["LD_LIBRARY_PATH"] = f"{folder}/a:{folder}/far"
        done = subprocess.run(
            [loader, "open", lib],
            env=environ,
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("copy\n", "")
        (process,) = read_logs(logs)
        assert process.copies == {str(lib)} and process.problems == ()
        # What lies above is the user's own.
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_small_limit_for_files_does_not_end_the_process(stage: Stage) -> None:
    """Writing past it would be a signal; what is lost is told as soon as a line fits again."""
    place(stage, stage.near, stage.near)
    stage.redirect(stage.lib, stage.near)
    assert stage.load("limit", "16", "open", stage.near, "limit", "65536", "open", stage.lib) == [
        "opened",
        "copy",
    ]
    (process,) = read_logs(stage.logs)
    assert process.problems == (f"1 records of process {process.pid} could not be written",)
    assert process.copies == {str(stage.lib)}


def test_a_full_disk_is_a_problem_not_an_end(stage: Stage) -> None:
    kept = stage.folder / "kept"
    kept.mkdir()
    script = (
        f"mount -t tmpfs -o size=4k,nr_inodes=100 none {stage.logs} && "
        f"head -c 4096 /dev/zero > {stage.logs}/full 2> /dev/null; "
        f"{stage.loader} open {stage.lib}; "
        f"cp {stage.logs}/*.log {kept}"
    )
    assert stage.run(*unshare(), "sh", "-c", script) == ["copy"]
    (process,) = (p for p in read_logs(kept) if p.problems)  # the other is the log of head
    assert process.problems == ("the log has no head; was the disk full?",)


def test_torn_and_strange_records_are_problems(stage: Stage) -> None:
    stage.load("open", stage.lib)
    (log,) = stage.logs.iterdir()
    with log.open("ab") as file:
        file.write(b"1\0lost\x003\0\0\xff\0copy\0/a\0\0")
        file.write(b"7\0original\0/a\tb\0/\xff\\\x008\0odd\0/a\0\x009\0co")
    (process,) = read_logs(stage.logs)
    assert process.copies == {str(stage.lib)}
    assert process.originals == {("/a\tb", "/\udcff\\")}
    assert process.problems == (
        "the last record is not whole: 'co'",
        "3 records of process 1 could not be written",
        "a record can't be read: ('\\udcff', 'copy')",
        "a record can't be read: ('8', 'odd')",
    )


def test_an_empty_log_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "12.34.56.log").touch()
    (tmp_path / "notes.log").touch()
    (process,) = read_logs(tmp_path)
    assert (process.pid, process.started_ns, process.executable) == (12, 34, "")
    assert process.problems == ("the log has no head; was the disk full?",)


def test_odd_names_are_written_as_they_are(stage: Stage) -> None:
    link = stage.lib.with_name("tab\tnew\nline\\.so")
    link.hardlink_to(stage.lib)
    # glibc does not ask for dlmopen of a path.
    assert stage.load("namespace", link) == ["original"]
    assert_original(stage, link)


# ---- The table ----

DAMAGED = "the table is damaged or not whole"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: b"", DAMAGED),
        (lambda text: text[:-1], DAMAGED),
        (lambda text: text[: text.rindex(b"end")], DAMAGED),
        (lambda text: text + b"more\n", DAMAGED),
        (lambda text: text.replace(b"redirect 1", b"redirect 2"), DAMAGED),
        (lambda text: text.replace(b"end\t1", b"end\t2"), DAMAGED),
        (lambda text: text.replace(b"library\t", b"library\tx"), DAMAGED),
        (lambda text: text.replace(b"/mirror", b"/other", 1), DAMAGED),
        (lambda text: text.replace(b"library\t", b"library\t" + b"9" * 30), DAMAGED),
        (lambda text: os.urandom(4096), DAMAGED),
        (lambda text: None, "the table can't be opened"),
    ],
)
def test_a_bad_table_disables_the_redirect(stage: Stage, change: object, reason: str) -> None:
    text = change(stage.table.read_bytes())  # type: ignore[operator]
    stage.table.unlink()
    if text is not None:
        stage.table.write_bytes(text)
    assert stage.load("open", stage.lib) == ["original"]
    (process,) = read_logs(stage.logs)
    assert process.lines == ()
    (problem,) = process.problems
    assert problem.startswith("nothing was redirected: ") and reason in problem
    assert str(stage.table) in problem


def test_a_named_pipe_for_a_table_does_not_block(stage: Stage) -> None:
    stage.table.unlink()
    os.mkfifo(stage.table)
    assert stage.load("open", stage.lib) == ["original"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tab\t.so", "control character"),
        ("line\n.so", "control character"),
        ("$LIB.so", "takes for one of its tokens"),
        ("\udcff.so", "not UTF-8"),
        ("/".join(["x" * 200] * 21), "at most 4095 are possible"),
    ],
)
def test_paths_that_cannot_stand_in_a_table(tmp_path: Path, name: str, reason: str) -> None:
    original = tmp_path / name
    assert reason in (why_not_replaceable(tmp_path / "mirror", original) or "")
    with pytest.raises(NegativaError, match=reason) as error:
        write_table(tmp_path / "table", tmp_path / "mirror", [original])
    assert repr(str(original)) in str(error.value)


def test_a_table_needs_real_copies(stage: Stage) -> None:
    copy = Path(copy_path(stage.root, stage.lib))
    assert why_not_replaceable(stage.root, stage.lib) is None
    assert "where the copies are" in (why_not_replaceable(stage.root, copy) or "")
    programs = {os.path.realpath(stage.lib)}
    assert "it is a program" in (why_not_replaceable(stage.root, stage.lib, programs) or "")
    copy.unlink()
    with pytest.raises(NegativaError, match="No such file"):
        write_table(stage.table, stage.root, [stage.lib])
    copy.symlink_to(stage.near)
    with pytest.raises(NegativaError, match="no symbolic link"):
        write_table(stage.table, stage.root, [stage.lib])
    copy.unlink()
    copy.hardlink_to(stage.lib)
    with pytest.raises(NegativaError, match="one file"):
        write_table(stage.table, stage.root, [stage.lib])


def test_nothing_can_be_loaded_from_noexec(stage: Stage) -> None:
    code = f"""
from pathlib import Path
from pytest_negativa.errors import NegativaError
from pytest_negativa.processes.redirect import write_table
try:
    write_table(Path("table"), {str(stage.other)!r}, [])
except NegativaError as e:
    print(e)
"""
    script = f"mount -t tmpfs -o noexec none {stage.other} && exec {sys.executable} -"
    done = subprocess.run(
        [*unshare(), "sh", "-c", script], input=code, capture_output=True, text=True, check=True
    )
    assert "mounted noexec" in done.stdout


def test_symbolic_links_of_one_original_are_one_row(stage: Stage) -> None:
    link = stage.other / "link.so"
    link.symlink_to(stage.lib)
    write_table(stage.table, stage.root, [stage.lib])
    one = stage.table.read_text()
    write_table(stage.table, stage.root, [link, stage.lib])
    assert stage.table.read_text() == one


# ---- The environment ----


def test_the_users_own_auditor_stays(stage: Stage) -> None:
    auditor = compile_c("redirect/auditor.c", stage.folder / "auditor.so", "-shared", "-fPIC")
    mark = stage.folder / "mark"
    stage.redirect(environ={**os.environ, "LD_AUDIT": str(auditor), "AUDITOR_MARK": str(mark)})
    assert stage.load("open", stage.lib) == ["copy"]
    assert_copy(stage)
    assert copy_path(stage.root, stage.lib) in mark.read_text().splitlines()


@pytest.mark.parametrize("own", [None, "", "/x/auditor.so", "/x/a.so:/x/b.so"])
def test_our_auditor_comes_first_and_once(own: str | None, tmp_path: Path) -> None:
    users = {} if own is None else {"LD_AUDIT": own}
    users |= {"GLIBC_TUNABLES": own} if own else {}
    before = {"PATH": "/bin", **users}
    after = {**before, **redirect_environment(before, tmp_path / "t", tmp_path / "l")}
    rest = f":{own}" if own else ""
    assert after["LD_AUDIT"] == f"{REDIRECT}{rest}"
    # Asked for twice, it is there once.
    again = {**after, **redirect_environment(after, tmp_path / "t", tmp_path / "l")}
    assert again == after


def test_an_empty_list_of_auditors_is_no_error(stage: Stage) -> None:
    stage.redirect(environ={**os.environ, "LD_AUDIT": "", "GLIBC_TUNABLES": ""})
    assert stage.load("open", stage.lib) == ["copy"]


def test_a_library_with_thread_local_storage_of_the_fast_kind(stage: Stage) -> None:
    """With an auditor there is little room for it, unless it is asked for."""
    storage = compile_c("redirect/storage.c", stage.folder / "storage.so", "-shared", "-fPIC")
    assert stage.load("open", stage.lib, LD_PRELOAD=str(storage)) == ["copy"]
    del stage.environment["GLIBC_TUNABLES"]
    done = subprocess.run([stage.loader], env={**stage.environment, "LD_PRELOAD": str(storage)})
    assert done.returncode != 0


def test_a_users_own_tunable_stays(stage: Stage) -> None:
    storage = compile_c("redirect/storage.c", stage.folder / "storage.so", "-shared", "-fPIC")
    own = "glibc.rtld.optional_static_tls=512:glibc.malloc.check=0"
    stage.redirect(environ={**os.environ, "GLIBC_TUNABLES": own, "LD_PRELOAD": str(storage)})
    done = subprocess.run([stage.loader], env=stage.environment)
    assert done.returncode != 0


def test_this_machine_is_supported() -> None:
    assert (why_unsupported() is None) == (platform.machine() in MACHINES)


# ---- Processes without a log ----


def test_a_static_executable(stage: Stage) -> None:
    program = compile_c("redirect/nothing.c", stage.folder / "static", "-static")
    assert stage.run(program) == []
    assert read_logs(stage.logs) == ()


@not_in_qemu("runs it as the caller, unless it is registered with the flag C")
def test_a_program_for_another_user(stage: Stage) -> None:
    program = stage.folder / "loader"
    if os.getuid() != 0:
        pytest.skip("only root can make a program of another user's")
    os.chown(program, 65534, 65534)
    program.chmod(0o6755)
    assert stage.load() == []
    assert read_logs(stage.logs) == ()


def test_a_real_library(stage: Stage) -> None:
    """The C library's own libm, found by the loader's cache or default folders."""
    paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    original = next(Path(path) for path in paths if "/libm.so" in path or "/libm-" in path)
    place(stage, original, original)
    stage.redirect(original)
    code = "import math, ctypes; ctypes.CDLL('libm.so.6'); print(math.cos(0))"
    assert stage.run(sys.executable, "-c", code) == ["1.0"]
    (process,) = read_logs(stage.logs)
    assert process.copies == {str(original.resolve())}
    assert process.originals == frozenset() and process.problems == ()


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.planted_fault(
    "another user puts a pipe or a link into the shared folder for logs",
    says="the log can't be read",
)
def test_what_is_no_log(stage: Stage, kind: str, fault: PlantedFault) -> None:
    stage.load("open", stage.lib)
    (log,) = stage.logs.iterdir()
    planted = log.with_name(log.name.replace(log.name.split(".")[0], "1"))
    if kind == "pipe":
        os.mkfifo(planted)
    else:
        planted.symlink_to(log)
    found = {process.log: process for process in read_logs(stage.logs)}
    fault.check(str(found[planted].problems))
    assert found[log].problems == ()


@pytest.mark.parametrize("is_link", [False, True])
def test_other_users_pass_what_was_made_here_alone(tmp_path: Path, is_link: bool) -> None:
    theirs = tmp_path / "private"
    theirs.mkdir(mode=0o700)
    base = tmp_path / ".negativa"
    if is_link:
        base.symlink_to(theirs)
    else:
        theirs.rename(base)
    logs = base / "verify" / "logs"
    make_logs_folder(logs, base)
    assert stat.S_IMODE(logs.stat().st_mode) == 0o1777
    assert stat.S_IMODE(logs.parent.stat().st_mode) & 0o011 == 0o011
    assert stat.S_IMODE(base.stat().st_mode) == (0o700 if is_link else 0o711)
