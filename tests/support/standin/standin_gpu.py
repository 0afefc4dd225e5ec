"""Stands in for a GPU in sessions that are verified: loaded with ``-p standin_gpu``.

Libraries are loaded and looked up in memory for real, and the records go through the real
recorder; only the driver is missing. "Using" a region is what a driver would do with it: note
it, and fail if the bytes it needs were overwritten.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import re
import sys
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.models.trace import (
    Context,
    Device,
    DeviceRecord,
    Header,
    LaunchRecord,
    Phase,
    Role,
)
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.system import ProcessMemory
from pytest_negativa.tracing.detector import TracerBusy
from pytest_negativa.tracing.images import ImageResolver
from pytest_negativa.tracing.mappings import Mappings
from pytest_negativa.tracing.recorder import Recorder
from pytest_negativa.tracing.start import make_header
from pytest_negativa.tracing.trace_files import TraceWriter

DEVICE = Device(
    name="Stand-in",
    compute_capability=os.environ.get("STANDIN_DEVICE", "9.0"),
    uuid="GPU-0",
    cuda_version=13000,
)
ROUND = re.sub(r".*-", "", Path(os.environ.get("NEGATIVA_ROUND", "-none")).parent.name)
"""``verify``, ``original``, ``probe``; the empty word where nothing is verified."""

# libquickstart.so: file offsets of its four regions, and of the element of each that sm_90 loads.
REGIONS = (13304, 25976, 46088, 65960)
USED = (18288, 32936, 54288, 72856)
# For sm_86, all of it on the page where the last of these begins: whoever reads one may read both.
BESIDE = 70560
KERNELS = (
    b"vector_add",
    b"_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii",
    b"statistics_weighted_sum",
    b"image_blur",
)

_current: StandInDetector | None = None


class StandInDetector:
    """Notes what tests say they use. See ``Detector``."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.mappings = Mappings()
        self._folder = path.parent
        self._writer = TraceWriter(path, replace(header, detector="stand-in"))
        self.recorder = Recorder(self._writer, self.mappings)
        self._stopped = False

    def start(self) -> None:
        global _current
        taken = os.environ.get("STANDIN_TAKEN", "").split(",")
        if os.environ.get("PYTEST_XDIST_WORKER", "none") in taken:
            raise TracerBusy("CUPTI serves one tool at a time and is taken")
        _current = self
        # For children that a test starts, see trace_program.
        os.environ["NEGATIVA_TRACE_DIR"] = str(self._folder)
        self._writer.write(DeviceRecord(device=DEVICE))

    def set_context(self, context: Context) -> None:
        self.recorder.set_context(context)

    def drain(self) -> None:
        self.recorder.libraries(self.mappings.new_libraries())

    def pause(self, reason: str) -> None:
        self.recorder.gap_begins(reason)

    def resume(self) -> None:
        self.recorder.gap_ends()

    def warn(self, code: str, text: str, *, incomplete: bool = False) -> None:
        self.recorder.warn(code, text, incomplete=incomplete)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.drain()
            self.recorder.end()


def pytest_negativa_register_detector(path: Path, header: Header) -> StandInDetector:
    return StandInDetector(path, header)


def trace_program() -> StandInDetector:
    """Trace this process into the folder that ``negativa verify`` and the like name."""
    run = Run(Path(os.environ["NEGATIVA_TRACE_DIR"]).parent)
    header = make_header(run, Role.CHILD, root=Path.cwd(), detector="stand-in")
    if _current is not None:
        # Forked by a traced session. The native library reads the words in /proc/self/cmdline.
        header = replace(header, argv=tuple(sys.orig_argv))
    detector = StandInDetector(run.new_trace_file(), header)
    detector.start()
    test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    context = Context(phase=Phase(phase.strip("()")), nodeid=test) if test else None
    detector.set_context(context or Context(phase=Phase.PROCESS))
    return detector


def child_environ() -> dict[str, str]:
    """The environment of a child that calls ``trace_program``."""
    assert _current is not None
    return {**os.environ, "NEGATIVA_TRACE_DIR": str(_current.path.parent)}


def load(library: str | os.PathLike[str]) -> None:
    """Load a library into this process, as any program does."""
    _base(os.path.realpath(library))


def _base(library: str) -> int:
    """Load a library; returns its base address.

    ``l_addr`` comes first in ``struct link_map``, see <link.h>. The loader of another machine
    refuses libquickstart.so, which is for x86-64: there its file is mapped as it is. In it, offsets
    of GPU code are addresses.
    """
    if platform.machine() == "x86_64":
        return ctypes.c_size_t.from_address(ctypes.CDLL(library)._handle).value
    return ctypes.addressof(ctypes.c_char.from_buffer(_mapped(library)))


@functools.cache
def _mapped(library: str) -> mmap.mmap:
    with open(library, "rb") as file:
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)


def need(library: str | os.PathLike[str], start: int) -> None:
    """Fail if what lies at a file offset of the loaded library was overwritten.

    No driver call shows it, as with code that a library unpacks itself.
    """
    if not _is_there(library, start):
        raise RuntimeError(f"no kernel image is available at {start}")


def _is_there(library: str | os.PathLike[str], start: int) -> bool:
    load(library)
    # By a load, as the driver reads: pages that are missing come back.
    found = ctypes.string_at(_address(library, start), 16)
    return len(set(found)) > 1


def use(library: str | os.PathLike[str], *regions: int) -> None:
    """Have the driver load regions of a copy of libquickstart.so, and look up their kernels."""
    load(library)
    resolver = ImageResolver(ProcessMemory(), Mappings())
    for number in regions or range(3):
        is_there = _is_there(library, USED[number])
        if _current is not None:
            image = resolver.resolve(_address(library, REGIONS[number]))
            handle = hash((os.fspath(library), number))
            # The region has headers of what was removed, too, and is loaded all the same.
            _current.recorder.loaded("cuLibraryLoadData", handle, image)
            if is_there:
                _current.recorder.kernel("cuLibraryGetKernel", handle, KERNELS[number])
            else:
                name = KERNELS[number]
                _current.recorder.refused("cuLibraryGetKernel", 209, handle=handle, name=name)
        if not is_there:
            raise RuntimeError(f"no kernel image is available in region {number}")


def load_code(code: bytes, kernel: bytes) -> None:
    """Have the driver load code that a program has in memory, and look up a kernel of it."""
    text = ctypes.create_string_buffer(code)
    image = ImageResolver(ProcessMemory(), Mappings()).resolve(ctypes.addressof(text))
    if _current is not None:
        _current.recorder.loaded("cuModuleLoadData", hash(code), image)
        _current.recorder.kernel("cuModuleGetFunction", hash(code), kernel)


def refuse(library: str | os.PathLike[str] | None, region: int, name: bytes, code: int) -> None:
    """Have the driver refuse a look-up in a region that was loaded; None: in unknown memory."""
    if _current is not None:
        handle = -1 if library is None else hash((os.fspath(library), region))
        _current.recorder.refused("cuLibraryGetKernel", code, handle=handle, name=name)


def launch(*kernels: str, within: tuple[str, ...] = ()) -> None:
    """Launch kernels that were looked up, for a microsecond; for traces that count launches."""
    if _current is not None:
        recorder = _current.recorder
        recorder.launches(
            (
                recorder.context,
                LaunchRecord(name=name, count=1, context=0, gpu_ns=1000, ranges=within),
            )
            for name in kernels
        )


def _address(library: str | os.PathLike[str], offset: int) -> int:
    """Where a byte of GPU code is in memory; compacted copies keep the addresses."""
    return _base(os.path.realpath(library)) + offset
