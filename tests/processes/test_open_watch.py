"""Opens of files, by real processes."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_negativa.processes.open_watch import OpenWatch
from tests.support.emulators import IS_PROGRAM, not_in_qemu
from tests.support.libraries import IS_ROOT, ROOT

# Opens the file, maps it, and closes it.
MAPS = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.so"
    path.write_bytes(b"a" * 5000)
    return path


@not_in_qemu(IS_PROGRAM)
def test_a_process_without_environment_is_seen_and_named(file: Path) -> None:
    linked = file.with_name("linked.so")
    linked.hardlink_to(file)
    with OpenWatch([str(file)]) as watch:
        child = subprocess.Popen(
            [sys.executable, "-c", MAPS, str(linked)],
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None and child.stdout.readline() == b"mapped\n"
        # The opener is looked for at each open until it is found.
        linked.read_bytes()
    child.communicate()
    [opener] = watch.opens.openers[str(file)]
    assert opener.who == f"process {child.pid} ({os.path.realpath(sys.executable)})"
    assert watch.opens.times[str(file)] >= 1 and not watch.opens.unseen


def test_an_open_by_this_process_or_by_one_that_is_gone(file: Path) -> None:
    other = file.with_name("b.so")
    other.write_bytes(b"")
    with OpenWatch([str(file), str(other)]) as watch:
        file.read_bytes()
        file.stat()
        os.listxattr(file)
    assert watch.opens.times == {str(file): 1} and watch.opens.openers == {}
    assert watch.opens.unseen == {}
    left = [os.fspath(d.readlink()) for d in Path("/proc/self/fd").iterdir() if d.is_symlink()]
    assert "anon_inode:inotify" not in left


def test_what_can_not_be_watched_is_told(file: Path) -> None:
    missing = str(file.with_name("missing.so"))
    with OpenWatch([missing, str(file)]) as watch:
        file.read_bytes()
    assert watch.opens.unseen == {missing: "inotify_add_watch: No such file or directory"}
    assert str(file) in watch.opens.times


@pytest.mark.skipif(not IS_ROOT, reason="only root may become another user")
def test_a_folder_that_may_be_passed_and_not_read() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "site")
        folder.mkdir()
        (folder / "a.so").touch()
        for closed in (folder, folder.parent):
            closed.chmod(0o711)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            with OpenWatch([f"{folder}/a.so"]) as watch:
                (folder / "a.so").read_bytes()
            told = {f"{folder}/a.so": "inotify_add_watch: Permission denied"}
            os._exit(watch.opens.unseen != told)
        assert os.waitpid(child, 0) == (child, 0)


def test_without_a_descriptor_left_nothing_is_seen(file: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with OpenWatch([str(file)]) as watch:
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    [reason] = watch.opens.unseen.values()
    assert reason.startswith("inotify_init1: Too many open files (the limit fs.inotify.max_user_")


FORKS = """
import ctypes, os, sys
from pytest_negativa.processes.open_watch import OpenWatch
watch = OpenWatch(sys.argv[1:])
watch.start()
open(sys.argv[1]).close()
assert ctypes.CDLL(None).unshare(0x20000000) == 0  # CLONE_NEWPID
child = os.fork()
assert os.getpid() == 1
if child == 0:
    watch.read()
    os._exit(0)
os.wait()
watch.finish()
assert watch.opens.times == {sys.argv[1]: 1}, watch.opens
"""


def test_a_child_with_its_parents_id_takes_no_events(file: Path) -> None:
    command = ["unshare", "-Urpf", sys.executable, "-c", FORKS, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if "unshare:" in done.stderr:
        pytest.skip("no namespaces")
    assert done.returncode == 0, done.stderr


FILLS = """
import os, sys
from pytest_negativa.processes import open_watch
with open("/proc/sys/user/max_inotify_watches", "w") as limit:
    limit.write("8")
watch = open_watch.OpenWatch(sys.argv[1:])
watch.start()
inotify = open_watch._call("inotify_init1", 0)
open_watch._call("inotify_add_watch", inotify, b"/", 0x20)
open(sys.argv[1]).close()
watch.finish()
print(len(watch.opens.times), sorted(watch.opens.unseen.values()))
"""


def test_the_limit_of_watches_leaves_some_to_the_tests(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(12)]
    for file in files:
        file.touch()
    command = ["unshare", "-Ur", sys.executable, "-c", FILLS, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if "unshare:" in done.stderr or "max_inotify_watches'" in done.stderr:
        pytest.skip("no namespaces of users, or no limit of theirs")
    reason = "inotify_add_watch: No space left on device (the limit fs.inotify.max_user_watches)"
    assert done.stdout == f"0 {[reason] * 12}\n", done.stderr


def test_events_that_the_kernel_dropped_are_a_lack_for_each_file(file: Path) -> None:
    watch = OpenWatch([str(file), "/b.so"])
    watch.add_events(struct.pack("iIII", -1, 0x4000, 0, 0))  # IN_Q_OVERFLOW of linux/inotify.h
    assert watch.opens.unseen == dict.fromkeys((str(file), "/b.so"), "too many opens at a time")


def test_a_file_in_the_place_of_one_that_lives_on_is_another_file(file: Path) -> None:
    file.with_name("linked.so").hardlink_to(file)
    (new := file.with_name("new")).write_bytes(b"")
    with OpenWatch([str(file)]) as watch:
        new.replace(file)
        file.read_bytes()
    assert watch.opens.unseen == {str(file): "the file was replaced or removed meanwhile"}
    assert watch.opens.times == {}


def test_a_file_that_is_made_anew_with_the_same_inode_is_another_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ext4 gives the number of the inode to the next file that is made.
    real, before = os.stat, file.stat()
    monkeypatch.setattr(
        os, "stat", lambda path, **options: before if path == str(file) else real(path, **options)
    )
    with OpenWatch([str(file)]) as watch:
        file.unlink()
        file.write_bytes(b"")
    assert watch.opens.unseen == {str(file): "the file was replaced or removed meanwhile"}
