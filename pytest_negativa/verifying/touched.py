"""Finds the removed code that failing tests touch, by a run on copies whose GPU code comes back.

The copies have no GPU code at all. A spare brings each page back when it is touched, and a log
names the page and what was touched first on it. So one run tells what many probes would find. It is
a hint: what it finds is given back, and proved like any other plan.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import NegativaError
from pytest_negativa.hostcode.page_logs import read_misses
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.spans import covers, minus, union
from pytest_negativa.planning.keep_needed import Part
from pytest_negativa.processes.page_watch import why_unwatchable
from pytest_negativa.processes.redirect import make_table, write_table
from pytest_negativa.rewriting.compact.cut import Cut, CutOptions, cut_library
from pytest_negativa.rewriting.reconstruct import copy_path
from pytest_negativa.spare.misses import Misses
from pytest_negativa.spare.note import PAGE_SIZE
from pytest_negativa.verifying.verification import Verification


@dataclass(frozen=True, slots=True)
class Touched:
    """What one run told.

    Attributes:
        surely: parts that were touched.
        maybe: parts of which pages can't tell: they share a touched page with other code, or a page
            that did not leave the copy.
    """

    surely: tuple[Part, ...] = ()
    maybe: tuple[Part, ...] = ()


def find_touched(
    verification: Verification,
    planned: Sequence[AnalyzedLibrary],
    parts: Sequence[Part],
    tests: Sequence[str],
) -> Touched | None:
    """Run the tests once on copies whose GPU code comes back.

    Args:
        planned: the libraries and their plans.
        parts: the removed code in question.
        tests: node ids of the failing tests.

    Returns:
        None if no library can be cut so.
    """
    wanted = {part.library for part in parts if part.code is None}
    libraries = [p for p in planned if p.plan.library.path in wanted]
    with tempfile.TemporaryDirectory(dir=verification.folder.folder, prefix="touched-") as name:
        folder = Path(name)
        cut = {
            p.plan.library.path: done
            for p in libraries
            if why_unwatchable() is None and (done := _cut(p, folder / "copies"))
        }
        if not cut:
            return None
        table, logs = folder / "table", folder / "logs"
        write_table(make_table(folder / "copies", list(cut)), table)
        verification.run_once(RoundKind.TOUCH, tests, table, misses=logs)
        return _told(parts, libraries, cut, _read(logs))


def _cut(planned: AnalyzedLibrary, copies: Path) -> Cut | None:
    """Write a copy without GPU code, and a spare; None: it can't be done."""
    library = planned.plan.library
    target = copy_path(copies, library.path)
    regions = [r.span for r in planned.library_map.iter_regions()]
    frames = [f.span for f in planned.library_map.iter_frames()]
    code = sorted((*regions, *frames))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        done = cut_library(
            library.path,
            target,
            copies.parent,
            minus([(0, library.size)], union(code)),
            CutOptions(min_hole=PAGE_SIZE, folders=(str(copies.parent),)),
            code,
        )
    except (NegativaError, OSError):
        return None
    return done if done.original_sha256 == library.sha256 else None


def _read(logs: Path) -> dict[str, Misses]:
    """What came back, by digest of the original; nothing if a log can't be read."""
    try:
        return {misses.original.hex(): misses for misses in read_misses([logs])}
    except NegativaError:
        return {}


def _told(
    parts: Sequence[Part],
    libraries: Sequence[AnalyzedLibrary],
    cut: Mapping[str, Cut],
    logs: Mapping[str, Misses],
) -> Touched:
    ends = {
        p.plan.library.path: {block.start: block.end for block in p.library_map.iter_code()}
        for p in libraries
    }
    surely: list[Part] = []
    maybe: list[Part] = []
    for part in parts:
        done = cut.get(part.library)
        if done is None or part.code is not None:
            continue
        end = ends[part.library][part.start]
        misses = logs.get(done.original_sha256)
        if misses is not None and is_touched(misses, part.start, end):
            surely.append(part)
        elif not covers(done.gaps, part.start, end) or (
            misses is not None and any(page in misses.pages for page in _pages(part.start, end))
        ):
            maybe.append(part)
    return Touched(tuple(surely), tuple(maybe))


def is_touched(misses: Misses, start: int, end: int) -> bool:
    """Whether a page was missed within ``[start, end)``, or first because of these bytes."""
    for page in _pages(start, end):
        miss = misses.pages.get(page)
        whole = start <= page * PAGE_SIZE and (page + 1) * PAGE_SIZE <= end
        if miss is not None and miss.times and (whole or start <= miss.first < end):
            return True
    return False


def _pages(start: int, end: int) -> range:
    return range(start // PAGE_SIZE, -(-end // PAGE_SIZE))
