"""The rows of a run's report: reasons, libraries, the proof, compiled code; their sums."""

from __future__ import annotations

from pytest_negativa.models.base import Record, Versioned
from pytest_negativa.models.coverage import LibraryCoverage
from pytest_negativa.models.plan import KernelUse


class ReasonRow(Record, frozen=True, kw_only=True):
    """Elements and bytes of one library that share a reason.

    Attributes:
        reason: a ``KeepReason`` or ``UnusedReason`` of the plan.
        elements: how many elements and bare frames.
        bytes: of them in the file.
    """

    reason: str
    elements: int
    bytes: int


class TrimmedRow(Record, frozen=True, kw_only=True):
    """Unused code inside cubins that are kept. Sizes in bytes, unpacked: not of the file.

    Attributes:
        cubins: how many cubins hold unused code.
        code_bytes: code of all their functions.
        unused_bytes: code that is unused.
    """

    cubins: int
    code_bytes: int
    unused_bytes: int


class LibraryRow(Record, frozen=True, kw_only=True):
    """One library with GPU code. Sizes in bytes.

    Attributes:
        path: real path.
        size: of the file.
        elements: elements and bare frames.
        code_bytes: GPU code: payloads with padding, and frames.
        kept, unused: what was decided, by reason.
        kernels: distinct kernels that the traced devices could load.
        used_kernels: how many of them the run used.
        first_uses: these kernels, with the test that used each first.
        unused_kernels: mangled names of the others if they are few; else empty.
        notes: what a reader should know.
        trimmed: what is unused inside kept cubins; None if nothing is.
        distribution, version: what installed it.
        is_files: it is all files of a distribution that are GPU code; each is an element.
    """

    path: str
    size: int
    code_bytes: int
    elements: int
    kept: tuple[ReasonRow, ...]
    unused: tuple[ReasonRow, ...]
    kernels: int
    used_kernels: int
    first_uses: tuple[KernelUse, ...]
    unused_kernels: tuple[str, ...]
    notes: tuple[str, ...]
    trimmed: TrimmedRow | None = None
    distribution: str | None = None
    version: str | None = None
    is_files: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return self.path.rpartition("/")[2]

    @property
    def unused_bytes(self) -> int:
        return sum(r.bytes for r in self.unused)

    @property
    def kept_elements(self) -> int:
        """Number of elements and frames that stay."""
        return self.elements - sum(r.elements for r in self.unused)

    def unused_bytes_by(self, reason: str) -> int:
        """Bytes in the file that are unused for one reason."""
        return sum(r.bytes for r in self.unused if r.reason == reason)


class ProofRow(Record, frozen=True, kw_only=True):
    """The last verdict on a run.

    Attributes:
        proved: whether the tests end as before without the unused code.
        reasons: why it is not proved; empty if it is.
        proved_bytes: bytes that are proved unused.
        copies: what the tests ran on: ``overwritten`` or ``compacted``.
        evidence: how many tests, on which GPUs, for people.
        parts: how many runs were proved apart, if the run unites several.
    """

    proved: bool
    reasons: tuple[str, ...]
    proved_bytes: int
    copies: str
    evidence: str = ""
    parts: int = 0


class RuntimeCode(Record, frozen=True, kw_only=True):
    """Modules of GPU code that were compiled at run time, or came from a compiler's cache.

    Attributes:
        kernels: the kernels that were looked up, by mangled name.
        first: the test, or the phase of the session, that loaded it first.
        seconds: from the start of the run to the begin of that test or phase.
        is_new: the run compiled it; else it lay in a cache when the run began.
        compiler: whose cache it is, or ``CUDA driver`` for PTX and for what the driver linked;
            None if that is unknown, as for code that NVRTC compiled.
        file: the file that holds it, or the library or file with its PTX; None if it was found in
            memory alone.
    """

    kernels: tuple[str, ...]
    first: str
    seconds: float
    is_new: bool
    compiler: str | None
    file: str | None


class RunReport(Versioned, Record, frozen=True, kw_only=True):
    """Results of a run, for reports.

    Attributes:
        run_id: of the run.
        directory: the run's folder.
        devices: e.g. ``"NVIDIA H200 (9.0)"``.
        replay: for a replayed trace: where and when it was recorded.
        gpu_used: whether any process loaded any GPU code.
        libraries: those with GPU code, the most unused bytes first.
        runtime: code that was compiled at run time, or came from a compiler's cache.
        not_covered: what the trace doesn't know, and why; the reader must see it.
        warnings: what else a reader should know.
        crossed: thresholds that were crossed.
        files: where to find more, relative to ``directory``.
        proof: the last verdict; None if the run was never verified.
        coverage: the kernels of the project's own libraries, with the tests that ran each.
        compared: what changed since the baseline; empty without one.
        unchecked: why limits check less than the settings ask for; any limit is then crossed.
        watched_bytes: unused bytes that each process watched, and none read.
    """

    run_id: str
    directory: str
    devices: tuple[str, ...]
    replay: str | None
    gpu_used: bool
    libraries: tuple[LibraryRow, ...]
    runtime: tuple[RuntimeCode, ...]
    not_covered: tuple[str, ...]
    warnings: tuple[str, ...]
    crossed: tuple[str, ...]
    files: tuple[str, ...]
    coverage: tuple[LibraryCoverage, ...] = ()
    proof: ProofRow | None = None
    compared: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    watched_bytes: int = 0

    @property
    def holders(self) -> tuple[int, int]:
        """Numbers of libraries, and of files that are GPU code themselves."""
        files = [row.elements for row in self.libraries if row.is_files]
        return len(self.libraries) - len(files), sum(files)

    @property
    def code_bytes(self) -> int:
        """Bytes of GPU code in all files."""
        return sum(row.code_bytes for row in self.libraries)

    @property
    def unused_bytes(self) -> int:
        return sum(row.unused_bytes for row in self.libraries)

    @property
    def trimmed(self) -> TrimmedRow | None:
        """The rows of all libraries as one."""
        rows = [row.trimmed for row in self.libraries if row.trimmed is not None]
        if not rows:
            return None
        return TrimmedRow(
            cubins=sum(row.cubins for row in rows),
            code_bytes=sum(row.code_bytes for row in rows),
            unused_bytes=sum(row.unused_bytes for row in rows),
        )
