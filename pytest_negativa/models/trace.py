"""Records of trace files, and ``Usage``, their union: gaps, warnings, what is incomplete.

A trace file is JSON lines, one record a line, written as things happen. So a process that is
killed loses nothing it had already recorded. Its first line is a ``Header``. Records
refer to each other by small ids that hold within one file. Several threads write, so a
reference may come before the record it refers to.

Times are nanoseconds since the epoch. Names of kernels and variables are mangled names.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import msgspec

from pytest_negativa.models.base import Line, NonNegative, Record, Row, Versioned
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.spans import Span

PROCESS_UNTRACED = frozenset({"cupti-taken", "cupti-unavailable"})
"""Codes of the lack that a process was not traced."""

EAGER_LOADING = "eager-loading"
"""Code of the warning that a process loaded whole images, and looked up all their kernels."""

UNENDED = "unended"
"""Code of the lack that a process that ran tests did not end by itself: tests are missing."""

LAUNCHES_CUT = "launches-cut"
"""Code of the warning that a child was killed, and the trace lacks its last launches."""

CHILDREN_UNTRACED = "children-untraced"
"""Code of the warning that nothing is known of what child processes did."""


class Role(str, enum.Enum):
    """What a process is to the session.

    ``SAMPLE`` is a process outside of any session, traced for a while. What it used counts. What
    it did not use says nothing: it may have used that before or after, and others may use it.
    """

    SOLO = "solo"
    CONTROLLER = "controller"
    WORKER = "worker"
    CHILD = "child"
    SAMPLE = "sample"

    @property
    def runs_tests(self) -> bool:
        """Whether its trace must have an end: without one, tests are missing."""
        return self in (Role.SOLO, Role.CONTROLLER, Role.WORKER)


class Phase(str, enum.Enum):
    """When in a session something happened; the last three belong to a test.

    ``PROCESS`` is a child process that no test is known to have started.
    """

    IMPORT = "import"
    COLLECTION = "collection"
    FIXTURE = "fixture"
    SESSION = "session"
    PROCESS = "process"
    SETUP = "setup"
    CALL = "call"
    TEARDOWN = "teardown"


class Context(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Where in a session the program is.

    Attributes:
        phase: see there.
        nodeid: pytest's node id of the test, or of the module or class of a fixture.
        detail: what else is known, e.g. the name of the fixture.
    """

    phase: Phase
    nodeid: str | None = None
    detail: str | None = None

    @property
    def test(self) -> str | None:
        """The node id of the test; None outside of tests."""
        is_test = self.phase in (Phase.SETUP, Phase.CALL, Phase.TEARDOWN)
        return self.nodeid if is_test else None

    @property
    def place(self) -> str:
        """The node id of the test; outside of tests, the fixture or phase of the session."""
        return self.test or str(self)

    def __str__(self) -> str:
        """As pytest has it in ``PYTEST_CURRENT_TEST``; outside of tests the detail or phase."""
        if self.nodeid is None:
            return self.phase.value if self.detail is None else self.detail
        return f"{self.nodeid} ({self.phase.value})"


AFTER_SESSION = Context(phase=Phase.SESSION, detail="after the session")
"""What a pytest process does after its last hook: ``atexit`` handlers, threads that still run."""


class ImageForm(str, enum.Enum):
    """What was handed to the driver to load.

    ``LINKED`` is what the driver's linker made at run time; ``UNKNOWN`` could not be
    recognised, or was loaded before tracing began.
    """

    FATBIN = "fatbin"
    CUBIN = "cubin"
    PTX = "ptx"
    LINKED = "linked"
    UNKNOWN = "unknown"


class DataKind(str, enum.Enum):
    """Which driver call family looked a data symbol up."""

    GLOBAL = "global"
    MANAGED = "managed"
    TEXTURE = "texture"
    SURFACE = "surface"
    UNIFIED_FUNCTION = "unified-function"


class TracedLibrary(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A file that was mapped into a process, or that the driver was told to load.

    It is the file as it was when the process saw it first. A file that changes has more records.

    Attributes:
        path: real path. If the file could not be read, only ``package_path`` is known besides.
        size: bytes.
        mtime_ns, ctime_ns: time of modification and of change of the inode, ns since the epoch.
        build_id: hex of the GNU build id, if it has one.
        package_path: the part of ``path`` below ``site-packages`` or ``dist-packages``,
            by which another installation of the same package finds its copy.
        device, inode: as ``stat`` tells them.
        sha256: of the file's bytes; None if they were not read before the file changed.
    """

    path: str
    size: NonNegative | None = None
    mtime_ns: int | None = None
    build_id: str | None = None
    package_path: str | None = None
    device: int | None = None
    inode: int | None = None
    ctime_ns: int | None = None
    sha256: str | None = None

    @property
    def state(self) -> FileState | None:
        """The state of the file; None if not all of it is known."""
        known = {name: getattr(self, name) for name in FileState.__struct_fields__}
        return None if None in known.values() else FileState(**known)


class Device(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU that the process could see.

    Attributes:
        name: as the driver names it.
        compute_capability: for example ``9.0``.
        uuid: as the driver tells it.
        cuda_version: of the driver's interface, 13000 for 13.0.
        driver_version: of the kernel module, if known.
    """

    name: str
    compute_capability: str
    uuid: str
    cuda_version: int
    driver_version: str | None = None

    @property
    def cuda(self) -> str:
        """The interface of its driver, for people: ``CUDA 13.0``."""
        return f"CUDA {self.cuda_version // 1000}.{self.cuda_version % 1000 // 10}"


class Replay(Record, frozen=True, kw_only=True):
    """Tells that records come from an earlier run on another machine.

    Attributes:
        device: the device of that run.
        recorded_ns: when that run began.
    """

    device: str
    recorded_ns: int


class Header(Line, frozen=True, kw_only=True, omit_defaults=True, tag="header"):
    """The first line: which process of which run this is.

    Attributes:
        detector: what traced it, with its version, e.g. ``"cupti-python 13.0.1"``.
        worker: pytest-xdist's name of a worker.
        python: version of Python, of a process that traces itself.
        root: the folder against which paths of the project can be understood.
        replay: set if nothing ran on a GPU here.
        locked: the process holds a lock (flock(2)) on the file for as long as it lives.
        lost: a record could not be written. The process overwrites the value in place, which needs
            no space on the disk.
    """

    format: Literal[1] = msgspec.field(default_factory=lambda: 1)  # A factory's is never left out.
    run_id: str
    pid: int
    ppid: int
    role: Role
    detector: str
    executable: str
    argv: tuple[str, ...]
    start_ns: int
    root: str
    worker: str | None = None
    python: str | None = None
    replay: Replay | None = None
    locked: bool = False
    # Never left out, and the last key: it is overwritten in place.
    lost: bool | None = None


class DeviceRecord(Line, frozen=True, kw_only=True, tag="device"):
    """A visible device."""

    device: Device


class LibraryRecord(Line, frozen=True, kw_only=True, omit_defaults=True, tag="library"):
    """A library seen in the process."""

    id: int
    library: TracedLibrary


class ContextRecord(Line, frozen=True, kw_only=True, tag="context"):
    """A context in which something was seen; written with the first thing seen in it."""

    id: int
    context: Context
    time_ns: int


class ImageRecord(Line, frozen=True, kw_only=True, omit_defaults=True, tag="image"):
    """GPU code that was handed to the driver.

    Either it lies in a library (``library`` and file ``offset``) or elsewhere in memory
    (``sha256`` of ``size`` bytes); neither for a form that is ``UNKNOWN``.

    Attributes:
        call: the driver function it was handed to.
        prelinked: file offsets, in the same library, of the relocatable images from which
            the driver could link this one again (a fatbin wrapper of version 2).
    """

    id: int
    form: ImageForm
    call: str
    context: int
    library: int | None = None
    offset: NonNegative | None = None
    size: NonNegative | None = None
    sha256: str | None = None
    prelinked: tuple[NonNegative, ...] = ()


class KernelRecord(Line, frozen=True, kw_only=True, tag="kernel"):
    """A kernel of an image was looked up; first time only."""

    image: int
    name: str
    context: int


class DataRecord(Line, frozen=True, kw_only=True, tag="data"):
    """A variable of an image was looked up; first time only."""

    image: int
    name: str
    kind: DataKind
    context: int


class EnumerationRecord(Line, frozen=True, kw_only=True, tag="enumeration"):
    """The program took hold of all that an image contains; all of it counts as used."""

    image: int
    call: str
    context: int


class RefusalRecord(Line, frozen=True, kw_only=True, omit_defaults=True, tag="refusal"):
    """The driver refused a call of ``driver_calls.h``; the first time for its image and symbol.

    Attributes:
        code: ``CUresult`` in cuda.h.
        image: the id of the image that the call was about, if it was loaded.
        library, offset: where the image lies that the call was to load.
        name: of the symbol that was looked up.
    """

    call: str
    code: int
    context: int
    image: int | None = None
    library: int | None = None
    offset: NonNegative | None = None
    name: str | None = None


class LaunchRecord(Line, frozen=True, kw_only=True, omit_defaults=True, tag="launch"):
    """How often a kernel was launched in a context; only where launches are recorded.

    Attributes:
        gpu_ns: how long the GPU ran it, all launches together.
        ranges: names of the NVTX ranges in which the thread that launched it was, the outermost
            first; empty outside of ranges, or if the detector doesn't tell.
    """

    name: str
    count: int
    context: int
    gpu_ns: int | None = None
    ranges: tuple[str, ...] = ()


class GapRecord(Line, frozen=True, kw_only=True, tag="gap"):
    """The detector is off from here on, until the ``GapEndRecord`` of the same id."""

    id: int
    reason: str = msgspec.field(name="why")  # The key of recordings that projects keep.
    context: int
    time_ns: int


class GapEndRecord(Line, frozen=True, kw_only=True, tag="gap-end"):
    """The detector is on again."""

    id: int
    time_ns: int


class WarningRecord(Line, frozen=True, kw_only=True, omit_defaults=True, tag="warning"):
    """Something a user should know; ``incomplete`` where used code may be missing."""

    code: str
    text: str
    incomplete: bool = False


class EndRecord(Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a process that came to its end. Without it, it was killed."""

    time_ns: int


AnyTraceRecord = (
    Header
    | DeviceRecord
    | LibraryRecord
    | ContextRecord
    | ImageRecord
    | KernelRecord
    | DataRecord
    | EnumerationRecord
    | RefusalRecord
    | LaunchRecord
    | GapRecord
    | GapEndRecord
    | WarningRecord
    | EndRecord
)


class FirstUse(Record, frozen=True, kw_only=True):
    """Where something was first seen.

    Attributes:
        process, context: indices into ``Usage.processes`` and ``.contexts``.
        time_ns: when the process came into that context.
    """

    process: NonNegative
    context: NonNegative
    time_ns: int


class Refusal(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A driver call that failed.

    Attributes:
        call, code, name: see ``RefusalRecord``.
        path, offset: file and place of the image; None if it lay in memory only, or is not known.
    """

    call: str
    code: int
    first: FirstUse
    path: str | None = None
    offset: NonNegative | None = None
    name: str | None = None


class ImageUse(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An image, and what was done with it in all processes.

    It lies in a library (``offset``), or was in memory alone, known by its content (``sha256``).

    Attributes:
        form: see there.
        calls: the driver functions it was handed to.
        kernels: those that were looked up, by mangled name.
        data: mangled names of the variables that were looked up.
        functions: mangled names of device functions whose address was looked up.
        enumerated_by: driver functions by which a program took hold of all of it.
        processes: indices into ``Usage.processes``.
        offset, prelinked: see ``ImageRecord``; of one in a library. In memory, -1 and none.
        sha256, size: of one in memory.
    """

    form: ImageForm
    calls: tuple[str, ...]
    kernels: Mapping[str, FirstUse]
    data: tuple[str, ...]
    functions: tuple[str, ...] = ()
    enumerated_by: tuple[str, ...]
    first: FirstUse
    processes: tuple[NonNegative, ...]
    offset: Annotated[int, msgspec.Meta(ge=-1)] = -1
    prelinked: tuple[NonNegative, ...] = ()
    sha256: str = ""
    size: NonNegative = 0

    @property
    def whole(self) -> bool:
        """Whether all its kernels must count as used, not only those that were looked up.

        They count if a program enumerated them, or if no look-up was seen. cuFFT loads modules
        and gets their kernels in a way that CUPTI doesn't show.
        """
        return bool(self.enumerated_by) or not self.kernels


class LibraryUsage(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Uses of a library. Without ``images``, it was only mapped.

    Attributes:
        touched: whole pages of GPU code that a process read, as file offsets; disjoint.
        untouched: those that each process watched, and none read.
    """

    library: TracedLibrary
    images: tuple[ImageUse, ...]
    processes: tuple[NonNegative, ...]
    touched: tuple[Span, ...] = ()
    untouched: tuple[Span, ...] = ()


class UsageProcess(Record, frozen=True, kw_only=True):
    """A process of the traced run.

    Attributes:
        ended: False for a process that was killed, or left without saying so (``_exit``,
            ``exec``). What it had done until then is in its trace all the same.
        counts_launches: its trace says how often it launched a kernel.
        last: the context that its trace names last.
    """

    header: Header
    trace: str
    ended: bool
    torn: bool = False
    counts_launches: bool = False
    last: Context | None = None


class LaunchRow(Row, frozen=True):
    """How often a kernel was launched in a context: ``[context, count, gpu_ns, ranges]``.

    Attributes:
        context: index into ``Usage.contexts``.
        gpu_ns: how long the GPU ran it, all launches together; None if a trace doesn't tell.
        ranges: index into ``Usage.ranges``; None outside of ranges, or if the trace doesn't tell.
    """

    context: NonNegative
    count: int
    gpu_ns: int | None = None
    ranges: NonNegative | None = None


class UsageWarning(Record, frozen=True, kw_only=True):
    """A warning of one process; ``process`` is None if it concerns the whole run."""

    code: str
    text: str
    process: NonNegative | None


class Usage(Versioned, Record, frozen=True, kw_only=True):
    """The union of all traces of a run: what was used, and what isn't known.

    Attributes:
        libraries: by path; every library that a traced process had mapped.
        memory_images: cubins and fatbins that no library holds at an address: unpacked by
            a library from its own file, or compiled at run time. By sha256.
        compiled: PTX text and what was linked at run time, which have no place in any file.
        launches: of each kernel, by context and ranges, a million rows in a large run; empty if no
            trace counts launches.
        ranges: each nesting of NVTX ranges around launches, see ``LaunchRecord``.
        refusals: what the driver refused, once for each call, image and symbol.
        incomplete: why more may have been used than is listed here; empty if nothing is
            missing. A plan from an incomplete usage must keep.
        replay: set where the records come from an earlier run on another machine.
    """

    run_ids: tuple[str, ...]
    devices: tuple[Device, ...]
    libraries: tuple[LibraryUsage, ...]
    memory_images: tuple[ImageUse, ...]
    compiled: tuple[ImageUse, ...]
    contexts: tuple[Context, ...]
    processes: tuple[UsageProcess, ...]
    launches: Mapping[str, tuple[LaunchRow, ...]]
    ranges: tuple[tuple[str, ...], ...]
    warnings: tuple[UsageWarning, ...]
    incomplete: tuple[UsageWarning, ...]
    replay: Replay | None = None
    refusals: tuple[Refusal, ...] = ()

    def context_of(self, first: FirstUse) -> Context:
        """The test, or the phase of the session, in which something was first seen."""
        return self.contexts[first.context]

    def iter_launches(self) -> Iterator[tuple[str, LaunchRow]]:
        """The rows of all launches, each with the kernel's name."""
        for name, rows in self.launches.items():
            for row in rows:
                yield name, row

    def ranges_of(self, row: LaunchRow) -> tuple[str, ...]:
        """Names of the NVTX ranges around launches; empty for none."""
        return () if row.ranges is None else self.ranges[row.ranges]

    def first_uses(self) -> Iterator[tuple[str | None, Context]]:
        """Where each image and each kernel was first seen, with the path of its library.

        The path is None for an image that lay in memory only.
        """
        images = [(used.library.path, image) for used in self.libraries for image in used.images]
        elsewhere = [(None, image) for image in (*self.memory_images, *self.compiled)]
        for path, image in (*images, *elsewhere):
            for first in (image.first, *image.kernels.values()):
                yield path, self.context_of(first)

    def why_incomplete(self, code: str | None = None) -> str | None:
        """Why the trace may lack uses of files; None if it is complete.

        Args:
            code: of the lacks to look at; None: all.
        """
        return next((lack.text for lack in self.incomplete if code in (None, lack.code)), None)

    @property
    def loads_eagerly(self) -> bool:
        """Whether a process ran with CUDA_MODULE_LOADING=EAGER."""
        return any(warning.code == EAGER_LOADING for warning in self.warnings)

    @property
    def is_witness(self) -> bool:
        """Whether it shows what no process read: pages were watched in a run that is complete.

        With eager loading the driver reads the headers of all that there is.
        """
        complete = self.why_incomplete() is None and not self.loads_eagerly
        return complete and any(library.untouched for library in self.libraries)

    def iter_images(self) -> Iterator[ImageUse]:
        """All images: of libraries, in memory, and compiled at run time."""
        for library in self.libraries:
            yield from library.images
        yield from (*self.memory_images, *self.compiled)
