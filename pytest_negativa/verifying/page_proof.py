"""CPU code of an attempt: what its rounds touched, what that shows, how it widens the traced run.

The rounds are watched as the traced run was: on the copies of a proof of GPU code, if there is
one, else on the originals. What they alone touched joins the trace, and is not claimed. A
touched page served the original's bytes, so the run was that of the wider trace: a third one would
show nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

from msgspec import structs

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.pages import FileKey, HostFile, HostLibrary, HostUsage
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.spans import PAGE_SIZE, minus, size
from pytest_negativa.models.verdict import (
    CpuProof,
    LibraryStatus,
    Need,
    ProvedLibrary,
    TestVerdict,
    Witness,
)
from pytest_negativa.pages.gather import load_files, require_usage, unite
from pytest_negativa.pages.page_logs import unwatched_programs
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.globs import matches_command
from pytest_negativa.verifying.evidence import Attempt

UNAUDITED = (
    "A static or set-user-ID program, or one that only ran without the environment of the trace, "
    "leaves no mark, and the proof says nothing of it."
)
_UNWATCHED = (
    "was started without NEGATIVA_PAGES_LOGS and LD_AUDIT, so what CPU code it touches is not "
    "known; pass them on, or accept it in verify.opened_originals (command:GLOB)"
)
UNCOMPARED = (
    "Without a GPU trace, the proof compares the exit status of the first process alone, not those "
    "of its children."
)


def gather_pages(attempt: Attempt) -> Attempt:
    """The attempt, with the CPU code that the traced run and its rounds touched.

    Raises:
        NegativaError: a log of the traced run is damaged.
        StoreError: a file of the traced run can't be read or written.
    """
    run = attempt.traced.run
    traced, known = require_usage(run), load_files(run).files
    files = (*known, *_copies_of(known, attempt.reconstruction))
    # Copies of earlier attempts are gone. What ran again on the originals counts, too.
    again = (r for r in attempt.all_rounds if r.kind is RoundKind.ORIGINAL and r.run.has_pages)
    rounds = [result.run for result in (*attempt.rounds, *again)]
    logs = dict.fromkeys(one.page_logs for one in (run, *rounds))
    started = dict.fromkeys(command for folder in logs for command in unwatched_programs(folder))
    accepted = attempt.settings.opened_originals
    try:
        found = unite([require_usage(one, files) for one in rounds])
    except NegativaError as e:
        # The attempt is judged nonetheless.
        found = structs.replace(traced, incomplete=(str(e),))
    return replace(
        attempt,
        pages=(traced, found),
        unwatched=tuple(
            f"{command}: {_UNWATCHED}"
            for command in started
            if not any(matches_command(glob, command) for glob in accepted)
        ),
    )


def judge_pages(
    traced: HostUsage,
    found: HostUsage,
    tests: Iterable[TestVerdict],
    against: Iterable[str],
    *,
    compares_ends: bool,
) -> CpuProof:
    """What follows from one run of all tests. Pure: nothing here touches a file.

    Args:
        traced, found: the pages that the traced run and the rounds touched.
        tests: how they ended.
        against: what speaks against the run besides its pages.
        compares_ends: whether the ends of other processes than the first are compared.
    """
    by_content = {library.sha256: library for library in found.libraries}
    rows = tuple(
        _judge_library(library, by_content.get(library.sha256))
        for library in traced.libraries
        if library.unwatched is None
    )
    reasons = [f"the traced run is not complete: {text}" for text in traced.incomplete]
    reasons += [f"the proof is not complete: {text}" for text in found.incomplete]
    reasons += against
    reasons += [f"{r.path}: {r.detail}" for r in rows if r.status is LibraryStatus.NOT_PROVED]
    if all(row.status is LibraryStatus.NOT_LOADED for row in rows):
        reasons.append("no process loaded a library with untouched pages")
    return CpuProof(
        proved=not reasons,
        reasons=tuple(reasons),
        processor=found.processors[0],
        limits=(UNAUDITED,) if compares_ends else (UNAUDITED, UNCOMPARED),
        libraries=tuple(row.doubted for row in rows) if reasons else rows,
        tests=tuple(test for test in tests if test.differs and not test.flaky),
    )


def _judge_library(traced: HostLibrary, found: HostLibrary | None) -> ProvedLibrary:
    if found is None:
        status, detail = LibraryStatus.NOT_LOADED, "left out: no process of the proof loaded it"
    elif found.unwatched is not None:
        status, detail = LibraryStatus.NOT_PROVED, "a process could touch all of its pages"
    else:
        status, detail = LibraryStatus.PROVED, None
    unused = size(minus(traced.untouched, () if found is None else found.touched))
    return ProvedLibrary(
        path=traced.paths[0],
        soname=None,
        build_id=traced.build_id,
        size=traced.size,
        sha256=traced.sha256,
        status=status,
        detail=detail,
        code_bytes=traced.watched_bytes,
        unused_bytes=unused,
        elements=traced.watched_bytes // PAGE_SIZE,
        unused_elements=unused // PAGE_SIZE,
        left_bytes=traced.watched_bytes - unused,
    )


def missed_pages(traced: HostUsage, found: HostUsage) -> Iterator[Need]:
    """The pages that the rounds alone touched, by library."""
    touched = {library.sha256: library.touched for library in found.libraries}
    for library in traced.libraries:
        missed = tuple(minus(touched.get(library.sha256, ()), library.touched))
        if missed and library.unwatched is None:
            places = ", ".join(f"{start:#x}-{end:#x}" for start, end in missed[:5])
            count = format_items(size(missed) // PAGE_SIZE, "page", "pages")
            yield Need(
                witness=Witness.TOUCHED_AGAIN,
                library=library.paths[0],
                spans=missed,
                kernel=f"{count} (file offsets {places})",
                test="the second watched run",
                kept=True,
            )


def _copies_of(files: Iterable[HostFile], reconstruction: Reconstruction) -> Iterator[HostFile]:
    """Copies as if they were their originals: their CPU code is the same, in the same places."""
    # By content: an original may have been touched, or installed again, since it was traced.
    known = {one.sha256: one for one in files}
    for copy in reconstruction.libraries:
        if (file := known.get(copy.library.sha256 or "")) is not None:
            own = FileKey.of(os.path.realpath(copy.copy), copy.copy_state)
            yield structs.replace(file, file=own, original=copy.library.path)
