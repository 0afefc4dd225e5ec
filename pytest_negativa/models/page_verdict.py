"""The verdict on CPU code: the record ``cpu-verdict.json``."""

from __future__ import annotations

from pytest_negativa.models.base import NonNegative, Record, Versioned
from pytest_negativa.models.hostcode import Processor
from pytest_negativa.models.spans import Span
from pytest_negativa.models.verdict import RoundFacts, TestVerdict

PAGE_VERDICT_VERSION = 2
"""Of ``cpu-verdict.json``. History: 2 has no processes of a library; 1 is the first."""


class ProvedPages(Record, frozen=True, kw_only=True):
    """One library in the proof of CPU code.

    Attributes:
        path: real path.
        sha256: of the file.
        untouched_bytes: code that no process of the traced run touched.
        missed: file offsets of pages that a process of the proof alone touched.
        detail: why it is not proved; None if it is.
        left_out: whether the verdict says nothing of it.
    """

    path: str
    sha256: str
    untouched_bytes: NonNegative
    missed: tuple[Span, ...]
    detail: str | None
    left_out: bool = False


class PageVerdict(Versioned, Record, frozen=True, kw_only=True):
    """What a run of the tests without the untouched pages showed.

    Attributes:
        run_id: the traced run.
        proved: nothing that was inaccessible is needed by the tests, on this CPU.
        reasons: why it is not proved; empty if it is.
        processor: the CPU of the proof.
        limits: what the proof does not cover, a sentence each.
        libraries: those with untouched pages.
        tests: of both runs.
        rounds: every start of the program.
    """

    run_id: str
    proved: bool
    reasons: tuple[str, ...]
    processor: Processor
    libraries: tuple[ProvedPages, ...]
    tests: tuple[TestVerdict, ...]
    rounds: tuple[RoundFacts, ...]
    limits: tuple[str, ...] = ()

    @property
    def covered(self) -> tuple[ProvedPages, ...]:
        """The libraries that the verdict is about."""
        return tuple(row for row in self.libraries if not row.left_out)
