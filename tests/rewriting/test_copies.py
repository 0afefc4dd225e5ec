"""One copy: what is in it, and what becomes of it when something goes wrong."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.errors import ReconstructError, StaleLibraryError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.rewriting.layout import (
    STEP,
    Edits,
    Fill,
    LayoutBuilder,
    Patch,
    StoppedError,
    state_of,
    write_copy,
    write_layout,
)
from pytest_negativa.storage.atomic import remove_abandoned
from tests.support.copying import MANY, SIZE, identity
from tests.support.libraries import BIN
from tests.support.reconstructing import apply


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Bytes of which no two stretches are alike."""
    path = tmp_path / "original" / "lib.so"
    path.parent.mkdir()
    path.write_bytes(b"".join(i.to_bytes(4, "big") for i in range(SIZE // 4 + 1))[:SIZE])
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "copies" / "lib.so"
    path.parent.mkdir()
    return path


@pytest.mark.parametrize(
    "edits",
    [MANY, Edits(SIZE), Edits(SIZE, (Fill(0, SIZE, 1),)), Edits(SIZE, (Patch(9, b"a"),))],
)
def test_content(original: Path, target: Path, edits: Edits) -> None:
    before = original.read_bytes(), state_of(original)
    facts = write_copy(identity(original), target, edits)

    expected = apply(before[0], edits)
    assert target.read_bytes() == expected
    assert facts == (hashlib.sha256(expected).hexdigest(), state_of(target), before[1])
    assert (original.read_bytes(), state_of(original)) == before
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("in_kernel", [True, False])
def test_parts_in_another_order(original: Path, target: Path, in_kernel: bool) -> None:
    """Of a new file: ranges of the old one, new bytes, zeros behind the old one's end."""
    builder = LayoutBuilder()
    assert builder.append_copy(SIZE - STEP, SIZE + 100) == 0
    assert builder.append(b"new", alignment=4096) == -(-(STEP + 100) // 4096) * 4096
    start = builder.append_copy(10, 3 * STEP, alignment=16)
    builder.change(Patch(7, b"header"))
    # In the first range, over the end of the old file; and in the last.
    builder.change(Fill(STEP - 50, STEP + 50, 9))
    builder.change(Fill(start + 5, start + 2 * STEP, 0))
    data = original.read_bytes()
    with ByteSource(original) as source, target.open("wb+") as file:
        write_layout(builder.build(), source, file.fileno(), copy_in_kernel=in_kernel)
    found = target.read_bytes()
    expected = bytearray(builder.size)
    expected[:STEP] = data[SIZE - STEP :]
    expected[7:13] = b"header"
    expected[STEP - 50 : STEP + 50] = bytes([9]) * 100
    new = -(-(STEP + 100) // 4096) * 4096
    expected[new : new + 3] = b"new"
    expected[start:] = data[10 : 3 * STEP]
    expected[start + 5 : start + 2 * STEP] = bytes(2 * STEP - 5)
    assert found == expected


def test_across_file_systems(original: Path) -> None:
    """Memory and disk: the kernel can't share blocks there, on some not even copy."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK) or folder.stat().st_dev == original.stat().st_dev:
        pytest.skip("no second file system to write to")
    target = folder / f"negativa-test-{os.getpid()}.so"
    try:
        write_copy(identity(original), target, MANY)
        assert target.read_bytes() == apply(original.read_bytes(), MANY)
    finally:
        target.unlink(missing_ok=True)


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o444, 0o6755])
def test_mode_and_time(original: Path, target: Path, mode: int) -> None:
    original.chmod(mode)
    os.utime(original, ns=(0, 10**18))
    start = time.time_ns()
    write_copy(identity(original), target, MANY)
    assert target.stat().st_mode & 0o7777 == mode & 0o777
    # Nobody takes it for the original by its time.
    assert target.stat().st_mtime_ns > start - 10**9


def test_link_in_its_place_is_replaced(original: Path, target: Path, tmp_path: Path) -> None:
    other = tmp_path / "precious"
    other.write_text("mine")
    target.symlink_to(other)
    write_copy(identity(original), target, MANY)
    assert not target.is_symlink() and other.read_text() == "mine"


def test_hard_link_of_the_original(original: Path, target: Path) -> None:
    """Replaced, were it another file; but who writes there means the original."""
    target.hardlink_to(original)
    before = original.read_bytes()
    with pytest.raises(ReconstructError, match="is the original itself"):
        write_copy(identity(original), target, MANY)
    with pytest.raises(ReconstructError, match="is the original itself"):
        write_copy(identity(original), original, MANY)
    assert original.read_bytes() == before


def test_earlier_copy_in_use_stays_as_it_is(original: Path, target: Path) -> None:
    """A process that has it mapped sees no other bytes."""
    write_copy(identity(original), target, Edits(SIZE))
    with target.open("rb") as user:
        write_copy(identity(original), target, MANY)
        assert user.read() == original.read_bytes()
    assert target.read_bytes() == apply(original.read_bytes(), MANY)


def test_hashed_once(original: Path, target: Path) -> None:
    """A digest that nothing has is found wrong only if the original is hashed."""
    library = replace(identity(original), sha256="0" * 64)
    hashed = state_of(original)
    sha256, _, state = write_copy(library, target, MANY, hashed=hashed)
    assert sha256 == hashlib.sha256(apply(original.read_bytes(), MANY)).hexdigest()
    assert state == hashed
    with pytest.raises(StaleLibraryError, match="sha256"):
        write_copy(library, target, MANY, hashed=replace(hashed, ctime_ns=hashed.ctime_ns - 1))

    def touch() -> bool:
        os.utime(original)
        return False

    with pytest.raises(StaleLibraryError, match="changed while it was copied"):
        write_copy(identity(original), target, MANY, touch, hashed=hashed)


class TestChangedOriginal:
    def refused(self, library: LibraryIdentity, target: Path, reason: str) -> None:
        with pytest.raises(StaleLibraryError, match=reason):
            write_copy(library, target, MANY)
        assert os.listdir(target.parent) == []

    def test_same_size_and_time(self, original: Path, target: Path) -> None:
        library = identity(original)
        with original.open("r+b") as file:
            file.seek(SIZE // 2)
            file.write(b"!")
        os.utime(original, ns=(library.mtime_ns, library.mtime_ns))
        now = identity(original)
        assert (now.size, now.mtime_ns) == (library.size, library.mtime_ns)
        self.refused(
            library,
            target,
            f"changed since it was traced: sha256 {now.sha256}, expected {library.sha256}; "
            "run pytest --negativa again",
        )

    def test_inside_of_what_is_filled(self, original: Path, target: Path) -> None:
        """The copy would be the same; but the plan was made for another file."""
        library = identity(original)
        with original.open("r+b") as file:
            file.seek(5 * STEP)
            file.write(b"!")
        self.refused(library, target, "sha256")

    def test_other_size(self, original: Path, target: Path) -> None:
        library = identity(original)
        with original.open("ab") as file:
            file.write(b"!")
        self.refused(library, target, f"{SIZE + 1:,} bytes, expected {SIZE:,}")

    def test_unknown_digest(self, original: Path, target: Path) -> None:
        self.refused(replace(identity(original), sha256=None), target, "digest isn't known")

    def test_while_it_is_copied(self, original: Path, target: Path) -> None:
        """Written to, and cut off, after the first steps of the copying."""
        library = identity(original)
        for change in (self._write, self._cut):
            calls = iter(range(10**9))

            def stop(change: object = change, calls: Iterator[int] = calls) -> bool:
                if next(calls) == 5:
                    assert callable(change)
                    change(original)
                return False

            with pytest.raises(StaleLibraryError, match=r"changed since|got shorter"):
                write_copy(library, target, MANY, stop)
            assert os.listdir(target.parent) == []

    @staticmethod
    def _write(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(SIZE - 10)
            file.write(b"!")

    @staticmethod
    def _cut(path: Path) -> None:
        os.truncate(path, STEP)


class TestDisk:
    @pytest.mark.parametrize("limit", [0, 1, SIZE // 2, SIZE - 1])
    def test_full(self, original: Path, target: Path, limit: int) -> None:
        """No file may be larger: the kernel's answer differs from that of a full disk in name."""
        target.write_text("earlier copy")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        library = identity(original)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(ReconstructError, match="cannot be written: File too large"):
                write_copy(library, target, MANY)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert os.listdir(target.parent) == [target.name]
        assert target.read_text() == "earlier copy"

    def test_folder_that_is_a_file(self, original: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ReconstructError, match="cannot be written: Not a directory"):
            write_copy(identity(original), tmp_path / "file" / "lib.so", MANY)

    def test_copy_that_reads_back_wrong(self, original: Path, target: Path) -> None:
        """Somebody else writes to the file meanwhile, as a faulty disk would."""

        def spoil() -> bool:
            for link in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()).startswith(f"{target.parent}/"):
                        os.pwrite(int(link.name), b"?", SIZE - 100)
            return False

        with pytest.raises(ReconstructError, match=r"reads back wrong.*is the disk sound"):
            write_copy(identity(original), target, MANY, spoil)
        assert os.listdir(target.parent) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StoppedError])
def test_interrupted(
    original: Path,
    target: Path,
    error: type[BaseException],
) -> None:
    target.write_text("earlier copy")
    for when in (0, 1, 5, 20):
        calls = iter(range(10**9))

        def stop(when: int = when, calls: Iterator[int] = calls) -> bool:
            if next(calls) == when:
                raise error
            return False

        with pytest.raises(error):
            write_copy(identity(original), target, MANY, stop)
        assert os.listdir(target.parent) == [target.name]
        assert target.read_text() == "earlier copy"


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.copying import MANY, identity
from pytest_negativa.rewriting.layout import write_copy

original, target, number, at = sys.argv[1:]
calls = iter(range(10**9))

def stop():
    if next(calls) == int(at):
        os.kill(os.getpid(), int(number))
    return False

write_copy(identity(Path(original)), Path(target), MANY, stop)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("at", [0, 30])
def test_killed(original: Path, target: Path, number: signal.Signals, at: int) -> None:
    target.write_text("earlier copy")
    before = original.read_bytes()
    arguments = [original, target, int(number), at]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], cwd=BIN.parents[2])
    assert done.returncode == -number
    assert target.read_text() == "earlier copy"
    assert original.read_bytes() == before
    # What is left has a hidden name, and the next reconstruction removes it.
    remove_abandoned(target)
    assert os.listdir(target.parent) == [target.name]
