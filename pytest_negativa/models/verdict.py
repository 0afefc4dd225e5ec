"""Verdicts on GPU and CPU code; kinds of differences; the sentence on flaky tests."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec.structs import replace

from pytest_negativa.models.base import NonNegative, Record, Versioned
from pytest_negativa.models.library import LibraryFile, LibraryIdentity
from pytest_negativa.models.outcomes import Aspect, Outcome
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import Device

TESTS_DIFFER = "the tests don't agree with the traced run"
"""Why a library is not proved if only the tests speak against it."""

FLAKY_RULE = "the originals alone gave both outcomes"
"""When a test is flaky. The traced run doesn't count, nor an end with a lost CUDA context."""


class LibraryStatus(str, enum.Enum):
    """What is known of a library's unused spans."""

    PROVED = "proved"
    NOT_PROVED = "not proved"
    NOT_SUBSTITUTED = "not substituted"
    NOTHING_UNUSED = "nothing unused"


class ProvedLibrary(LibraryFile, frozen=True, kw_only=True):
    """One library with a plan, or with traced CPU code. Sizes in bytes.

    Attributes:
        path, size, build_id, soname: of the original, see ``LibraryFile``.
        sha256, copy_sha256: of the original and of the copy that ran in its place; the latter
            is None if there is no copy.
        status: what is known of its unused GPU code.
        spans: file offsets of what was overwritten as a whole.
        pages: pages of CPU code that no process touched, traced or in the proof, see
            ``pages_in_words``; None if one of these runs did not load or watch the library.
        code_bytes: GPU code of the original.
        unused_bytes: bytes of elements and frames that were overwritten as a whole.
        elements: how many elements and frames it has.
        unused_elements: how many of them were overwritten.
        trimmed: what was overwritten inside kept cubins, by file offset of the payload or frame:
            offsets in the unpacked cubin.
        trimmed_code_bytes: how much code that is, unpacked.
        watched_bytes: how much of ``spans`` was armed: whoever touched it would be a difference.
        watched_elements: how many of the overwritten elements and frames have an armed page.
        left_bytes: GPU code that stays in the copy, packed as it is there.
        detail: the reason if its GPU code isn't proved.
        notes: remarks on the copy, such as code that could not be removed from it.
        copy_size: bytes of the copy's file; None if there is no copy.
        processes: how many processes had the copy mapped.
    """

    sha256: str | None
    copy_sha256: str | None = None
    status: LibraryStatus
    detail: str | None = None
    code_bytes: NonNegative = 0
    unused_bytes: NonNegative = 0
    elements: NonNegative = 0
    unused_elements: NonNegative = 0
    trimmed_code_bytes: NonNegative = 0
    left_bytes: NonNegative = 0
    copy_size: NonNegative | None = None
    processes: NonNegative = 0
    spans: tuple[Span, ...] = ()
    watched_bytes: NonNegative = 0
    watched_elements: NonNegative = 0
    trimmed: Mapping[int, tuple[Span, ...]] = {}
    notes: tuple[str, ...] = ()
    pages: str | None = None

    @classmethod
    def unproved(cls, plan: LibraryPlan) -> ProvedLibrary:
        """The row of a plan of which nothing is proved: no copy, no span."""
        library = plan.library
        return cls(
            path=library.path,
            soname=library.soname,
            build_id=library.build_id,
            size=library.size,
            sha256=library.sha256,
            status=LibraryStatus.NOT_PROVED,
            code_bytes=plan.code_bytes,
            elements=len(plan.decisions),
            left_bytes=plan.code_bytes,
        )

    @property
    def doubted(self) -> ProvedLibrary:
        """The row if something else speaks against what it proves."""
        if self.status is not LibraryStatus.PROVED:
            return self
        return replace(self, status=LibraryStatus.NOT_PROVED, detail=TESTS_DIFFER)


class AspectChange(Record, frozen=True, kw_only=True):
    """What differs between two ends of a test with the same outcome.

    Attributes:
        aspect: what was compared.
        before, after: what only the traced run has, and what only the run on the copies has.
        tolerated: whether ``verify.tolerate`` names the aspect.
    """

    aspect: Aspect
    before: tuple[str, ...]
    after: tuple[str, ...]
    tolerated: bool = False


class TestVerdict(Record, frozen=True, kw_only=True):
    """A test of either run.

    Attributes:
        nodeid: of the test.
        before, after: how it ended in the traced run and on the copies; None: it did not run.
        flaky: the originals alone gave both outcomes; see ``FLAKY_RULE``.
        text: its error on the copies, shortened.
        gpu_error: the error that it left the CUDA context with, unless it does so on the originals.
        libraries: real paths of the libraries that it used first in the traced run.
        changes: in what else the two ends differ, if the outcomes are equal.
    """

    __test__ = False

    nodeid: str
    before: Outcome | None
    after: Outcome | None
    flaky: bool = False
    text: str | None = None
    gpu_error: str | None = None
    libraries: tuple[str, ...] = ()
    changes: tuple[AspectChange, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether it ended otherwise on the copies, or lost its CUDA context there."""
        tolerated = all(change.tolerated for change in self.changes)
        return self.before is not self.after or self.gpu_error is not None or not tolerated


class Witness(str, enum.Enum):
    """The kind of evidence for a need."""

    NOT_USED = "used when traced, but not on the copies"
    NOT_LAUNCHED = "launched when traced, but not on the copies"
    REFUSED = "refused by the driver on the copies alone"
    TOUCHED = "removed, and touched on the copies"
    NOT_REPEATED = (
        "used when traced, and not repeated on the copies: its images stay whole, and no process "
        "touched what was removed"
    )
    USED_AGAIN = (
        "used on the originals alone, by tests that failed or differed and ran again: it stays"
    )
    TOUCHED_AGAIN = "touched by the second watched run alone: it stays"


NEEDS = frozenset({Witness.REFUSED, Witness.TOUCHED})
"""Witnesses that name the removed code that was needed."""

STAYING = frozenset({Witness.NOT_REPEATED, Witness.USED_AGAIN})
"""Witnesses that refuse no proof: the code that such work may need stays in the plan."""

_REASONS = {
    Witness.REFUSED: "the driver refused it to {}",
    Witness.TOUCHED: "touched on the copies by {}",
    Witness.USED_AGAIN: "used on the originals by {}, which ran again there",
    Witness.NOT_REPEATED: (
        "the copies did not repeat all work, and nothing shows that it needs none of it"
    ),
}


class Need(Record, frozen=True, kw_only=True):
    """Code that a process needed, or may need.

    Attributes:
        witness: what shows it.
        library: real path of the original, or the file name of a library without a copy; None if
            no library is known to hold it.
        sha256: of the library, if ``spans`` are kept: they are at each path of the same content.
        spans: file offsets of it, if they are known: elements, frames, trimmed cubins as a whole,
            pages of CPU code.
        image: file offset in hex, or the SHA-256 of an image in memory; None if not known.
        kernel: mangled name of a kernel or variable, or what else was done with the image; None
            for an image whose kernels were not looked up.
        test: the test, or the phase of the session, that used it first or launched it.
        nodeid: the node id of that test, or of the module or class of a fixture.
        note: what else is known of it.
        kept: whether ``spans`` stay from now on, so that it speaks against nothing.
    """

    witness: Witness
    library: str | None = None
    sha256: str | None = None
    spans: tuple[Span, ...] = ()
    image: str | None = None
    kernel: str | None = None
    test: str = ""
    nodeid: str | None = None
    note: str | None = None
    kept: bool = False

    def is_of(self, library: LibraryIdentity) -> bool:
        """Whether it is of a library, at this path or another one."""
        return self.library == library.path or self.sha256 == (library.sha256 or "")

    @property
    def is_against(self) -> bool:
        """Whether it speaks against the plan."""
        return not self.kept and self.witness is not Witness.NOT_REPEATED

    @property
    def is_healed(self) -> bool:
        """Whether healing gave it back."""
        return self.kept and self.witness in NEEDS

    @property
    def detail(self) -> str:
        """The needed code and its user, in words."""
        what = self.kernel or f"the image at {self.image}"
        of = f" of {self.library.rpartition('/')[2]}" if self.library is not None else ""
        how = "first used in" if self.witness is Witness.NOT_USED else "in"
        note = f", {self.note}" if self.note is not None else ""
        return f"{what}{of}, {how} {self.test}{note}"

    @property
    def reason(self) -> str:
        """Reason for which the code stays, in words. Locks repeat it, so it has no process id."""
        return _REASONS[self.witness].format(self.nodeid or "a process")


class RoundFacts(Record, frozen=True, kw_only=True):
    """One start of the program.

    Attributes:
        name: of the round's folder.
        kind: what the round was for.
        tests: how many tests have an outcome.
        status: exit status, negative for a signal.
        silent: it was ended because no test began or ended for too long.
        seconds: how long it took.
    """

    name: str
    kind: str
    tests: NonNegative
    status: int
    silent: bool
    seconds: float


class Verdict(Versioned, Record, frozen=True, kw_only=True):
    """What a verification showed. The record can be kept as evidence.

    Attributes:
        run_id: the traced run whose plan was verified.
        proved: nothing of what was overwritten is needed by the tests.
        reasons: why it is not proved; empty if it is.
        command: the words that started the tests.
        exit_status: that of the first round on the copies, negative for a signal.
        fill: the byte that unused spans were filled with.
        copies: ``overwritten``, or ``compacted``: without the unused code.
        granularity: ``element`` or ``kernel``.
        gpu_tests: how many tests were seen to load GPU code on the copies.
        created_ns: when, nanoseconds since the epoch.
        devices: the GPUs of the verification.
        versions: software of the verification, by name.
        libraries: those with a plan, and those whose CPU code was traced. Of files that are GPU
        libraries: those with a plan, and those whose CPU code was traced. Of files that are GPU
            code there is no copy: ``spans`` are the files that no process opened.
        tests: of both runs.
        rounds: every start of the program.
        changes: what the tests were started with otherwise than when traced.
        needs: what the tests need, or used otherwise than when traced; if their outcomes differ,
            only what was refused or touched. What is ``kept`` of the plan is not proved: healing
            gave it back, work may need it that was not repeated, or tests used it that ran again.
        healing: whether what was refused or touched was given back.
        parts: ids of the runs that were proved, if ``run_id`` unites several.
        cpu_reasons: why no ``pages`` of CPU code are proved; empty if they are; None if they were
            not to be proved. Without a plan of GPU code, these are ``reasons``, too.
    """

    run_id: str
    proved: bool
    reasons: tuple[str, ...]
    command: tuple[str, ...]
    exit_status: int | None
    fill: int
    copies: str = "overwritten"
    granularity: str
    gpu_tests: int
    created_ns: int
    devices: tuple[Device, ...]
    versions: dict[str, str]
    libraries: tuple[ProvedLibrary, ...]
    tests: tuple[TestVerdict, ...]
    rounds: tuple[RoundFacts, ...]
    changes: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    healing: bool = False
    parts: tuple[str, ...] = ()
    cpu_reasons: tuple[str, ...] | None = None

    @property
    def gpu_libraries(self) -> tuple[ProvedLibrary, ...]:
        """Those with a plan of GPU code."""
        return tuple(row for row in self.libraries if row.elements)

    def row_of(self, path: str) -> ProvedLibrary | None:
        """The row of the library with this real path."""
        return next((row for row in self.libraries if row.path == path), None)

    @property
    def differences(self) -> tuple[TestVerdict, ...]:
        """Tests that speak against the plan."""
        return tuple(t for t in self.tests if t.differs and not t.flaky)

    @property
    def unmet(self) -> tuple[Need, ...]:
        """Needs that speak against the plan."""
        return tuple(need for need in self.needs if need.is_against)
