"""CPU code of an attempt: what its rounds touched, what that shows, how it widens the traced run.

The rounds are watched as the traced run was: on the copies of a proof of GPU code, if there is
one, else on the originals. What they alone touched joins the trace, and is not claimed. A
touched page served the original's bytes, so the run was that of the wider trace: a third one would
show nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.pages import FileKey, HostFile, HostUsage
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.spans import PAGE_SIZE, Span, minus, pages_in_words, size
from pytest_negativa.models.verdict import (
    LibraryStatus,
    Need,
    ProvedLibrary,
    Verdict,
    Witness,
)
from pytest_negativa.pages.gather import load_files, require_usage, unite
from pytest_negativa.pages.page_logs import unwatched_programs
from pytest_negativa.reporting.units import format_items
from pytest_negativa.settings.globs import matches_command
from pytest_negativa.verifying.evidence import Attempt

_UNWATCHED = (
    "was started without NEGATIVA_PAGES_LOGS and LD_AUDIT, so what CPU code it touches is not "
    "known; pass them on, or accept it in verify.opened_originals (command:GLOB)"
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
    rounds = [
        result.run
        for result in attempt.all_rounds
        if result in attempt.rounds or (result.kind is RoundKind.ORIGINAL and result.run.has_pages)
    ]
    try:
        found = unite([require_usage(one, files) for one in rounds])
    except NegativaError as e:
        # The attempt is judged nonetheless.
        found = structs.replace(traced, incomplete=(str(e),))
    started = (text for one in (run, *rounds) for text in unwatched_programs(one.page_logs))
    unwatched = (
        f"{command}: {_UNWATCHED}"
        for command in dict.fromkeys(started)
        if not any(matches_command(glob, command) for glob in attempt.settings.opened_originals)
    )
    found = structs.replace(found, incomplete=(*found.incomplete, *unwatched))
    return replace(attempt, pages=(traced, found))


def judge_pages(
    verdict: Verdict, traced: HostUsage, found: HostUsage, against: Iterable[str]
) -> Verdict:
    """The verdict, with what one run of all tests shows of CPU code. Pure: it touches no file.

    Args:
        verdict: on GPU code; without a library if there is none.
        traced, found: the pages that the traced run and the rounds touched.
        against: what speaks against the run besides its pages.
    """
    by_content = {library.sha256: library for library in found.libraries}
    rows = {(row.path, row.sha256): row for row in verdict.libraries}
    needs = list(verdict.needs)
    for library in (one for one in traced.libraries if one.unwatched is None):
        keys = [(path, library.sha256) for path in library.paths]
        key = next(filter(rows.__contains__, keys), keys[0])
        row = rows.get(key) or ProvedLibrary(
            path=library.paths[0],
            soname=None,
            build_id=library.build_id,
            size=library.size,
            sha256=library.sha256,
            status=LibraryStatus.NOTHING_UNUSED,
        )
        again = by_content.get(library.sha256)
        if again is not None and again.unwatched is None:
            unused = minus(library.untouched, again.touched)
            row = structs.replace(row, pages=pages_in_words(unused))
            needs += _missed(row.path, tuple(minus(again.touched, library.touched)))
        rows[key] = row
    reasons = (*traced.incomplete, *found.incomplete, *against)
    if all(row.pages is None for row in rows.values()):
        reasons += ("no process loaded a library with untouched pages",)
    if not verdict.gpu_libraries:
        verdict = structs.replace(verdict, proved=not reasons, reasons=reasons)
    return structs.replace(
        verdict,
        libraries=tuple(rows.values()),
        needs=tuple(needs),
        cpu_reasons=reasons,
        versions={**verdict.versions, "processor": found.processors[0]},
    )


def _missed(path: str, pages: Sequence[Span]) -> Iterator[Need]:
    """The pages of a library that the rounds alone touched."""
    if pages:
        places = ", ".join(f"{start:#x}-{end:#x}" for start, end in pages[:5])
        count = format_items(size(pages) // PAGE_SIZE, "page", "pages")
        yield Need(
            witness=Witness.TOUCHED_AGAIN,
            library=path,
            spans=tuple(pages),
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
