"""Which file a process had at an address, though files come and go under one name."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.trace import ImageForm, LibraryUsage, Usage
from pytest_negativa.storage.system import ProcessMemory
from pytest_negativa.tracing.children import Children, outer_sockets
from pytest_negativa.tracing.images import FoundImage
from pytest_negativa.tracing.mappings import Mappings
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.recorder import Recorder
from pytest_negativa.tracing.trace_files import TraceWriter
from tests.support.faults import PlantedFault
from tests.support.libraries import NO_FIXTURES, PLAIN, QUICKSTART_LIBRARY
from tests.support.traces import header


class Process:
    """This process, of which a trace is written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "trace.jsonl"
        self._mappings = Mappings()
        self._recorder = Recorder(TraceWriter(self._path, header()), self._mappings)
        self._libraries: list[ctypes.CDLL] = []
        self._handles = 0

    def load(self, path: str | Path) -> ctypes.CDLL:
        """Have the loader map a library."""
        if platform.machine() != "x86_64":
            pytest.skip(NO_FIXTURES)
        library = ctypes.CDLL(str(path))
        self._libraries.append(library)
        return library

    def close(self, library: ctypes.CDLL) -> None:
        self._libraries.remove(library)
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))

    def close_all(self) -> None:
        for library in tuple(self._libraries):
            self.close(library)

    def look(self) -> None:
        """Note what is mapped, as after each test."""
        self._recorder.libraries(self._mappings.new_libraries())

    def use(self, library: ctypes.CDLL, kernel: str) -> None:
        """Have the driver load an image that lies in the library."""
        base = ProcessMemory().read_exactly(library._handle, 8)
        assert base is not None
        place = self._mappings.find(int.from_bytes(base, "little") + 64)
        self._handles += 1
        image = FoundImage(ImageForm.FATBIN, place=place, size=64)
        self._recorder.loaded("cuLibraryLoadData", self._handles, image)
        self._recorder.kernel("cuLibraryGetKernel", self._handles, kernel.encode())

    def usage(self) -> Usage:
        self._recorder.end()
        return merge_traces([self._path])


def used(usage: Usage) -> list[LibraryUsage]:
    return [library for library in usage.libraries if library.images]


def kernels(library: LibraryUsage) -> set[str]:
    return {kernel for image in library.images for kernel in image.kernels}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    yield made
    made.close_all()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copy(QUICKSTART_LIBRARY, tmp_path / "copy.so"))


def test_a_file_is_known_by_what_it_was_at_first_sight(process: Process, copy: Path) -> None:
    state = FileState.of(copy.stat())
    process.use(process.load(copy), "a")
    (found,) = used(process.usage())
    assert found.library.state == state


def test_a_file_that_is_removed_after_it_was_seen_is_the_same(process: Process, copy: Path) -> None:
    library = process.load(copy)
    process.look()
    copy.unlink()
    process.use(library, "a")
    process.load(PLAIN)
    process.use(library, "b")
    usage = process.usage()
    (found,) = used(usage)
    assert kernels(found) == {"a", "b"}
    assert found.library.size == QUICKSTART_LIBRARY.stat().st_size and not usage.incomplete


@pytest.mark.planted_fault(
    "A test removes a copy of a library at once after loading it, and then runs its GPU code.",
    says="copy.so: GPU code was loaded from this file after it had been deleted or replaced",
)
def test_a_file_that_is_removed_unseen(process: Process, copy: Path, fault: PlantedFault) -> None:
    library = process.load(copy)
    copy.unlink()
    process.use(library, "a")
    fault.check(" ".join(warning.text for warning in process.usage().incomplete))


@pytest.mark.planted_fault(
    "A program loads a library with GPU code from a file in memory (memfd).",
    says="/memfd:lib: GPU code was loaded from this file after it had been deleted or replaced",
)
def test_a_library_in_memory_alone(process: Process, fault: PlantedFault) -> None:
    fd = os.memfd_create("lib")
    os.write(fd, QUICKSTART_LIBRARY.read_bytes())
    process.use(process.load(f"/proc/self/fd/{fd}"), "a")
    os.close(fd)
    fault.check(" ".join(warning.text for warning in process.usage().incomplete))


def test_a_descriptor_of_a_file_leads_to_the_file(process: Process, copy: Path) -> None:
    with copy.open("rb") as file:
        process.use(process.load(f"/proc/self/fd/{file.fileno()}"), "a")
    (found,) = used(process.usage())
    assert found.library.path == str(copy)


def test_a_file_may_be_named_like_a_deleted_one(process: Process, copy: Path) -> None:
    odd = copy.rename(copy.with_name("x.so (deleted)"))
    process.use(process.load(odd), "a")
    usage = process.usage()
    (found,) = used(usage)
    assert found.library.path == str(odd) and found.library.size and not usage.incomplete


def test_two_files_at_one_path_are_two_libraries(process: Process, copy: Path) -> None:
    first = process.load(copy)
    process.use(first, "a")
    shutil.copy(PLAIN, f"{copy}.new")
    Path(f"{copy}.new").replace(copy)
    # Another name, for the loader knows libraries by name, too.
    second = process.load(f"{copy.parent}/./{copy.name}")
    process.use(second, "b")
    process.use(first, "c")
    usage = process.usage()
    found = {library.library.size: kernels(library) for library in used(usage)}
    sizes = [path.stat().st_size for path in (QUICKSTART_LIBRARY, PLAIN)]
    assert found == {sizes[0]: {"a", "c"}, sizes[1]: {"b"}}
    assert not usage.incomplete


def test_a_file_that_is_written_between_two_loads_is_two_libraries(
    process: Process, copy: Path
) -> None:
    first = process.load(copy)
    process.use(first, "a")
    process.close(first)
    copy.write_bytes(PLAIN.read_bytes())
    process.use(process.load(copy), "b")
    assert [kernels(library) for library in used(process.usage())] in (
        [{"a"}, {"b"}],
        [{"b"}, {"a"}],
    )


def test_a_small_file_without_build_id_is_hashed_at_once(process: Process, tmp_path: Path) -> None:
    data = QUICKSTART_LIBRARY.read_bytes().replace(b"\x03\0\0\0GNU\0", b"\x03\0\0\0XXX\0")
    nameless = tmp_path / "nameless.so"
    nameless.write_bytes(data)
    process.use(process.load(nameless), "a")
    nameless.unlink()
    (found,) = used(process.usage())
    assert found.library.build_id is None
    assert found.library.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.planted_fault(
    "A test starts a pytest session with --negativa, which traces itself into a run of its own.",
    says="is traced into another run",
)
def test_a_session_within_sessions(
    tmp_path: Path, fault: PlantedFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, outermost = Children(), Children()
    around = {"NEGATIVA_LACKS": outer.name, "NEGATIVA_OUTER_LACKS": outermost.name}
    for name, value in outer_sockets(around).items():
        monkeypatch.setenv(name, value)
    inner = Process(tmp_path)
    library = inner.load(QUICKSTART_LIBRARY)
    inner.look()
    # It used no GPU code yet.
    assert not list(outer.untraced())

    inner.use(library, "vector_add")

    [lack] = outer.untraced()
    fault.check(lack)
    assert [lack] == list(outermost.untraced())
    outermost.close()
    outer.close()
