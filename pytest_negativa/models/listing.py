"""Output of commands with ``--json``, if no file has the same rows."""

from __future__ import annotations

import enum

from pytest_negativa.models.base import NonNegative, Record, Versioned


class ListedKernel(Record, frozen=True, kw_only=True):
    """A kernel of a library.

    Attributes:
        name: mangled.
        signature: demangled.
        first: the test, or the phase of the session, that used it first; None if unused.
        launches: how often the test launched it; None without a test or at level ``lookup``.
        gpu_ns: how long the GPU ran it for the test; None if that is unknown.
        libraries: paths of the libraries that have it and were used, in a list of tests; empty if
            it came from none of them, such as one that was compiled at run time.
    """

    name: str
    signature: str
    first: str | None = None
    launches: NonNegative | None = None
    gpu_ns: NonNegative | None = None
    libraries: tuple[str, ...] = ()


class LibraryKernels(Record, frozen=True, kw_only=True):
    """The kernels of a library that the run's devices could load.

    Attributes:
        path: real path.
        total: how many there are.
        listed: how many of them are of the kind that is listed, such as unused.
        kernels: those of them that match the globs that are asked for.
    """

    path: str
    total: NonNegative
    listed: NonNegative
    kernels: tuple[ListedKernel, ...]


class MachineFact(Record, frozen=True, kw_only=False):
    """Fact on this machine.

    Attributes:
        name: what it is about.
        value: what was found.
        obstacle: why tracing can't work with it; None if it can.
    """

    name: str
    value: str
    obstacle: str | None = None


class RunRow(Record, frozen=True, kw_only=True):
    """A traced run.

    Attributes:
        run_id: its id.
        folder: its folder.
        is_latest: it was traced or planned last.
        state: in words, how far it came, why no further, and whether it replays a recording.
        size: bytes of its files.
    """

    run_id: str
    folder: str
    is_latest: bool
    state: str
    size: NonNegative


class LaunchRange(Record, frozen=True, kw_only=True):
    """Kernels that a test ran in a range.

    Attributes:
        ranges: names of the NVTX ranges around the launches, the outermost first; empty outside.
        kernels: those with the most GPU time first.
    """

    ranges: tuple[str, ...]
    kernels: tuple[ListedKernel, ...]


class ListedTest(Record, frozen=True, kw_only=True):
    """A test that ran kernels.

    Attributes:
        test: the node id of the test; the fixture or phase of the session for what no test did.
        kernels: how many different ones it ran.
        launches: of all of them; None if the trace recorded the first look-up alone.
        gpu_ns: of all launches; None if that is unknown.
        by_range: what it ran; the ranges with the most GPU time first.
    """

    test: str
    kernels: NonNegative
    launches: NonNegative | None
    gpu_ns: NonNegative | None
    by_range: tuple[LaunchRange, ...]


class SimilarPair(Record, frozen=True):
    """Two tests, modules or markers, compared by the kernels that they ran; or two runs.

    Attributes:
        left, right: their names.
        shared: how many both ran.
        either: how many at least one of them ran.
        similarity: the Jaccard similarity, ``shared / either``.
    """

    left: str
    right: str
    shared: NonNegative
    either: NonNegative
    similarity: float


class NeededLibrary(Record, frozen=True, kw_only=True):
    """Code of a library that some of the tests need.

    Attributes:
        path: real path.
        gpu_code: its bytes of GPU code.
        all_tests: bytes that all tests need; None if they have no plan for it.
        these_tests: bytes that the chosen tests need.
        used_kernels: how many kernels the chosen tests use.
    """

    path: str
    gpu_code: NonNegative
    all_tests: NonNegative | None
    these_tests: NonNegative
    used_kernels: NonNegative


class NeedList(Versioned, Record, frozen=True, kw_only=True):
    """Code of a run's libraries that some of the tests need.

    Attributes:
        run_id: the run.
        chosen: how many tests are chosen.
        tests: how many the run has.
        all_tests: bytes that all tests need.
        libraries: those that the chosen tests need most of come first.
    """

    run_id: str
    chosen: NonNegative
    tests: NonNegative
    all_tests: NonNegative
    libraries: tuple[NeededLibrary, ...]


class CodeKind(str, enum.Enum):
    """Kind of the code at the first touched place of a page that came back."""

    FUNCTION = "function"
    GPU_CODE = "GPU code"
    GPU_HEADERS = "GPU headers"  # of regions and elements, which the driver reads to choose
    OTHER = "other"


class MissedCode(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A function, or an element or frame of GPU code, that came back.

    Attributes:
        kind: what it is.
        offset: file offset, in the original, of the function, payload, frame or section; None for
            a function that no table names.
        name: mangled name of a function, if it has a symbol; the section of other code.
        region: file offset of the region of an element.
        arch: of GPU code.
        kernels: mangled names of its kernels.
        pages: how many pages of it came back.
        misses: how often, in all processes.
    """

    kind: CodeKind
    offset: NonNegative | None
    name: str | None = None
    region: NonNegative | None = None
    arch: str | None = None
    kernels: tuple[str, ...] = ()
    pages: NonNegative
    misses: NonNegative


class MissedLibrary(Record, frozen=True, kw_only=True):
    """A library whose pages came back.

    Attributes:
        name: the file's name.
        sha256, size: of the original.
        path: where it, or the original, is; None if it was not found.
        pages: how many pages of 4 KiB came back.
        beside: how many of these came back unasked, beside another page.
        misses: how often a process, with its forked children, touched such a page first.
        code: what came back, the most misses first.
        unknown: why it is not known; else None.
    """

    name: str
    sha256: str
    size: NonNegative
    path: str | None
    pages: NonNegative
    beside: NonNegative
    misses: NonNegative
    code: tuple[MissedCode, ...]
    unknown: str | None
