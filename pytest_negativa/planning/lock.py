"""The lock of a verdict: what it keeps, leaves out and why; widening; a lock back to a plan.

Of GPU code, a lock says what stays, so that it is short and a diff of two shows what changed. All
other GPU code of the library is unused. Of CPU code, it says what is unused: all else stays, also
what no tracer watched. A digest over the elements' places makes sure that two releases find
the same elements: the one that made the lock and the one that applies it.
"""

from __future__ import annotations

import datetime
import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict, replace

from pytest_negativa.errors import ReconstructError
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import Cubin, Element, LibraryMap
from pytest_negativa.models.lock import (
    KeptCode,
    LeftOut,
    Lock,
    LockedLibrary,
    Place,
    Proof,
    ProvingDevice,
    seal,
)
from pytest_negativa.models.pages import HostUsage
from pytest_negativa.models.plan import (
    Decision,
    KeepReason,
    LibraryPlan,
    TrimmedCubin,
    UnusedReason,
)
from pytest_negativa.models.reconstruction import FILL
from pytest_negativa.models.spans import covers, intersection, pages_in_words
from pytest_negativa.models.verdict import LibraryStatus, ProvedLibrary, Verdict
from pytest_negativa.planning.keep_needed import keep
from pytest_negativa.planning.reachable import reachable_code

_SPAN = struct.Struct("<QQ")
_SPARED = "not proved: it was still there when the tests ran"
_ALL_SPARED = "nothing that is unused was taken out of the copy that was proved"
_NOT_VERIFIED = ("it was not verified",)
_PLANNED_ANEW = "planned anew since it was proved: prove it again"


def make_lock(
    run_id: str,
    planned: Sequence[AnalyzedLibrary],
    verdict: Verdict | None,
    place_of: Callable[[str], Place],
    *,
    touched: HostUsage | None = None,
    unplanned: Sequence[LeftOut] = (),
    incomplete: tuple[str, ...] = (),
    unproved: bool = False,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
) -> Lock:
    """The lock of a run.

    Args:
        run_id: of the run.
        planned: all its libraries, with those that are the files of a distribution.
        verdict: what verification said; None if there was none.
        place_of: from a real path.
        touched: the pages that its processes touched, if all of that is known. They come back when
            they are used, so they need no proof.
        unplanned: what else it loaded that has, or may have, GPU code; by its real path.
        incomplete: why there may be more.
        unproved: take what has unused code, proved or not.
        include, exclude: see ``Lock``.

    Raises:
        ReconstructError: nothing is proved, and ``unproved`` is not set.
    """
    reasons = _reasons(verdict)
    if reasons and not unproved:
        raise ReconstructError(f"{run_id}: this run is not proved: {'; '.join(reasons)}")
    locked: list[LockedLibrary] = []
    left_out = [replace(one, **asdict(place_of(one.path))) for one in unplanned]
    of_files = {one.plan.library.sha256 for one in planned if one.plan.is_files}
    # A lock is applied by digest: what is left out at one place must not be slimmed for another.
    stays: dict[str | None, str] = {}
    for one in planned:
        path = one.plan.library.path
        row = lock_or_leave(one, verdict, place_of(path), unproved=unproved)
        if isinstance(row, LockedLibrary):
            locked.append(row)
        else:
            # Of files, the distribution is none whose libraries the run is known to load.
            left_out.append(replace(row, distribution=None) if one.plan.is_files else row)
            stays[one.plan.library.sha256] = row.path
    left_out += [
        LeftOut(
            path=row.path,
            distribution=row.distribution,
            version=row.version,
            soname=row.soname,
            reason=f"{stays[row.sha256]} has the same bytes, and is left out",
        )
        for row in locked
        if row.sha256 in stays and row.sha256 not in of_files
    ]
    locked = _once([row for row in locked if row.sha256 not in stays])
    libraries = tuple(row for row in locked if row.sha256 not in of_files)
    proof = replace(_proof(run_id, verdict, reasons, planned), incomplete=incomplete)
    if touched is not None:
        libraries = with_pages(libraries, touched, place_of, is_new=True)
        proof = replace(
            proof,
            processors=touched.processors,
            pages_not_proved=_why_pages_unproved(libraries, verdict),
            notes=tuple(
                f"{text}; CPU code that only {of} tests need comes from the spare"
                for texts, of in ((touched.failed, "such"), (touched.chosen, "other"))
                for text in texts
            ),
            failed=bool(touched.failed),
        )
    lock = Lock(
        digest="",
        proof=proof,
        libraries=libraries,
        left_out=tuple(sorted(left_out, key=lambda row: row.path)),
        include=include,
        exclude=exclude,
        files=tuple(row for row in locked if row.sha256 in of_files),
    )
    return seal(lock)


def lock_or_leave(
    one: AnalyzedLibrary, verdict: Verdict | None, place: Place, *, unproved: bool
) -> LockedLibrary | LeftOut:
    """A library as the lock has it, or why the lock leaves it out.

    Args:
        unproved: lock it even if its plan is not proved.
    """
    plan, doubt = one.plan, _doubt(one.plan, verdict)
    row = None if verdict is None else verdict.row_of(plan.library.path)
    # What a round opened stays, proved or not.
    if verdict is not None and (doubt is None or (plan.is_files and row is not None)):
        plan = _proved_part(plan, row)
        if not plan.unused_bytes and not plan.trimmed and not _why_never(one.plan):
            plan, doubt = one.plan, _ALL_SPARED
    plan = _with_all_that_stays(plan, one.library_map)
    reason = _why_never(plan) or (None if unproved else doubt)
    if reason is not None:
        return LeftOut(**asdict(place), soname=plan.library.soname, reason=reason)
    return _lock_library(plan, one.library_map, place, doubt)


def code_digest(spans: Sequence[tuple[int, int]]) -> str:
    """Digest of where elements and frames lie: of start and end of each, ascending, as u64."""
    digest = hashlib.sha256()
    for start, end in sorted(spans):
        digest.update(_SPAN.pack(start, end))
    return digest.hexdigest()


def plan_from_lock(locked: LockedLibrary, library_map: LibraryMap) -> LibraryPlan:
    """The plan that a lock's library stands for.

    Args:
        locked: of exactly this library.
        library_map: with the digest of the file; with the content of the cubins that have
            ``functions``, see ``needs_content``.

    Raises:
        ReconstructError: the lock doesn't fit what was found in the library.
    """
    blocks = {block.payload.start: block for block in library_map.iter_code()}
    spans = sorted((block.payload.start, block.payload.end) for block in blocks.values())
    if len(spans) != locked.elements or code_digest(spans) != locked.code_sha256:
        raise ReconstructError(
            f"{library_map.library.path}: the lock was made for {locked.elements:,} elements of "
            f"GPU code, and {len(spans):,} or others are found: another release of "
            "pytest-negativa made it; make it again"
        )
    kept = {code.offset: code for code in locked.kept}
    if unknown := sorted(kept.keys() - blocks.keys()):
        raise ReconstructError(
            f"{library_map.library.path}: the lock keeps an element at {unknown[0]:#x}, where "
            "there is none; make it again"
        )
    trimmed = (_trimmed(code, blocks[code.offset], library_map) for code in locked.kept)
    plan = LibraryPlan(
        library=library_map.library,
        devices=locked.devices,
        decisions=tuple(_decide(span, kept) for span in spans),
        used_kernels=(),
        unused_kernels=(),
        trimmed=tuple(filter(None, trimmed)),
        granularity="kernel" if needs_content(locked) else "element",
    )
    _check_totals(locked, plan)
    return plan


def widen_library(
    locked: LockedLibrary,
    library_map: LibraryMap,
    missed: Mapping[int, str],
    reason: KeepReason = KeepReason.MISSED,
    whole: Collection[int] = (),
) -> LockedLibrary:
    """A lock's library that keeps more. The lock must be sealed again.

    Args:
        locked, library_map: see ``plan_from_lock``.
        missed: what else to keep: details by start of the element's payload or of the frame.
        reason: why.
        whole: starts of trimmed cubins to keep as a whole.

    Raises:
        ReconstructError: the lock doesn't fit what was found in the library.
    """
    plan = plan_from_lock(locked, library_map)
    added = {d.start for d in plan.decisions if not d.kept} & missed.keys()
    plan = keep(plan, {**dict.fromkeys(whole, ""), **{s: missed[s] for s in added}}, reason)
    kept = (replace(code, functions=None) if code.offset in whole else code for code in locked.kept)
    blocks = {block.payload.start: block for block in library_map.iter_code()}
    new = (_kept_code(d, blocks[d.start]) for d in plan.decisions if d.start in added)
    return replace(
        locked,
        **_totals(plan),
        kept=tuple(sorted((*kept, *new), key=lambda code: code.offset)),
    )


def with_pages(
    rows: Iterable[LockedLibrary],
    touched: HostUsage,
    place_of: Callable[[str], Place],
    *,
    is_new: bool = False,
) -> tuple[LockedLibrary, ...]:
    """A lock's libraries, and all that a run loaded, with their unused pages.

    Args:
        touched: what the processes of the run touched, if all of that is known.
        place_of: from a real path.
        is_new: the rows know no pages. Else they keep what this run touched, too.
    """
    found = {row.sha256: row for row in rows}
    for library in touched.libraries:
        places = [place_of(path) for path in library.paths]
        row = found.get(library.sha256) or LockedLibrary(
            **asdict(places[0]), sha256=library.sha256, size=library.size
        )
        before = library.unused if is_new else row.spans if row.loaded else ()
        found[library.sha256] = replace(
            row,
            others=tuple(sorted({*row.others, *(place.path for place in places)} - {row.path})),
            pages=pages_in_words(intersection(before, library.unused)),
            loaded=True,
        )
    return tuple(found.values())


def needs_content(locked: LockedLibrary) -> bool:
    """Whether cubins of the library must be unpacked to apply the lock."""
    return any(code.functions is not None for code in locked.kept)


def _reasons(verdict: Verdict | None) -> tuple[str, ...]:
    if verdict is not None and verdict.proved:
        return ()
    return (verdict.reasons if verdict is not None else ()) or _NOT_VERIFIED


def _why_never(plan: LibraryPlan) -> str | None:
    if plan.library.sha256 is None:
        return "its digest isn't known"
    if not plan.unused_bytes and not plan.trimmed:
        all_files = plan.notes if plan.is_files else ()
        return next(iter(all_files), LibraryStatus.NOTHING_UNUSED.value)
    return None


def _doubt(plan: LibraryPlan, verdict: Verdict | None) -> str | None:
    """The reason that a library's plan is not proved; None if it is."""
    row = None if verdict is None else verdict.row_of(plan.library.path)
    if verdict is None or row is None:
        return "not verified"
    if row.status is not LibraryStatus.PROVED:
        return f"{row.status.value}: {row.detail}" if row.detail else row.status.value
    if row.sha256 != plan.library.sha256:
        return "another file than the one that was proved: trace and prove again"
    # Of a compacted copy, what isn't gone may have been left for a reason. Files have no copy. Runs
    # that are united have no copy in common.
    if not (verdict.copies == "compacted" or plan.is_files or verdict.parts) and not all(
        d.kept or not d.size or covers(row.spans, d.start, d.end) for d in plan.decisions
    ):
        return _PLANNED_ANEW
    if plan.trimmed and verdict.granularity != "kernel":
        return _PLANNED_ANEW
    return None if verdict.proved else LibraryStatus.NOT_PROVED.value


def _proved_part(plan: LibraryPlan, row: ProvedLibrary | None) -> LibraryPlan:
    """The plan, without what was still in the copy when the tests ran.

    Rewriting spares what it can't take out safely.
    """
    assert row is not None
    trimmed = (
        replace(
            cubin,
            unused=tuple(c for c in cubin.unused if covers(row.trimmed.get(cubin.start, ()), *c)),
        )
        for cubin in plan.trimmed
    )
    return replace(
        plan,
        decisions=tuple(
            d
            if d.kept or not d.size or covers(row.spans, d.start, d.end)
            else Decision(d.start, d.end, True, KeepReason.INCOMPLETE.value, d.detail or _SPARED)
            for d in plan.decisions
        ),
        trimmed=tuple(cubin for cubin in trimmed if cubin.unused),
    )


def _with_all_that_stays(plan: LibraryPlan, library_map: LibraryMap) -> LibraryPlan:
    """The plan, its trimmed cubins with the names of all functions that aren't unused code.

    A lock says what is unused by those names alone. Code that was given back, or never taken, is in
    none of the ranges and needs its name, and what it calls stays with it.
    """
    found = {block.payload.start: block for block in library_map.iter_code()}
    trimmed = (_trim_no_more(cubin, found.get(cubin.start), library_map) for cubin in plan.trimmed)
    return replace(plan, trimmed=tuple(cubin for cubin in trimmed if cubin.unused))


def _trim_no_more(
    cubin: TrimmedCubin, block: Element | None, library_map: LibraryMap
) -> TrimmedCubin:
    """``cubin`` with less unused code, or the same; with none where its functions aren't known."""
    content = None if block is None else block.content
    if not isinstance(content, Cubin):
        return replace(cubin, unused=())
    found = reachable_code(
        content,
        [
            f.name
            for f in content.functions
            if not covers(cubin.unused, f.offset_in_cubin, f.offset_in_cubin + f.code_size)
        ],
    )
    if isinstance(found, str) or not all(covers(cubin.unused, *code) for code in found.unused):
        return replace(cubin, unused=())
    names = tuple(sorted({library_map.names[i] for i in found.kept}))
    return replace(cubin, kept=names, unused=found.unused)


def _lock_library(
    plan: LibraryPlan, library_map: LibraryMap, place: Place, doubt: str | None
) -> LockedLibrary:
    found = {block.payload.start: block for block in library_map.iter_code()}
    spans = [(d.start, d.end) for d in plan.decisions]
    if sorted(spans) != sorted(block.payload for block in found.values()):
        raise ReconstructError(
            f"{plan.library.path}: map and plan of the run don't fit; plan again (negativa locate)"
        )
    functions = {trimmed.start: trimmed.kept for trimmed in plan.trimmed}
    library = plan.library
    assert library.sha256 is not None
    return LockedLibrary(
        **asdict(place),
        soname=library.soname,
        build_id=library.build_id,
        sha256=library.sha256,
        size=library.size,
        devices=plan.devices,
        **_totals(plan),
        code_sha256=code_digest(spans),
        not_proved=doubt,
        kept=tuple(
            _kept_code(d, found[d.start], functions.get(d.start))
            for d in sorted(plan.decisions, key=lambda d: d.start)
            if d.kept
        ),
    )


def _kept_code(
    decision: Decision, block: Element, functions: tuple[str, ...] | None = None
) -> KeptCode:
    return KeptCode(
        offset=decision.start,
        arch=block.arch,
        reason=KeepReason(decision.reason),
        region=None if block.region is None else block.anchor,
        detail=decision.detail,
        functions=functions,
    )


def _once(libraries: Sequence[LockedLibrary]) -> list[LockedLibrary]:
    """A library that the run had loaded from two places, once; not proved if one of them isn't."""
    found: dict[str, LockedLibrary] = {}
    for library in sorted(libraries, key=lambda library: library.not_proved is None):
        first = found.setdefault(library.sha256, library)
        if [(c.offset, c.functions) for c in first.kept] != [
            (c.offset, c.functions) for c in library.kept
        ]:
            raise ReconstructError(
                f"{first.path} and {library.path} are copies of one file, and the run "
                "used different parts of them; lock a run that loads one of them"
            )
    return list(found.values())


def _proof(
    run_id: str,
    verdict: Verdict | None,
    reasons: tuple[str, ...],
    planned: Sequence[AnalyzedLibrary],
) -> Proof:
    if verdict is None:
        granularity = "kernel" if any(one.plan.trimmed for one in planned) else "element"
        return Proof(
            proved=False,
            not_proved=reasons,
            run=run_id,
            granularity=granularity,
            fill=FILL,
            tests={},
            devices=(),
            versions={},
        )
    outcomes = Counter(t.after.value if t.after else "not run" for t in verdict.tests)
    moment = datetime.datetime.fromtimestamp(verdict.created_ns // 10**9, datetime.timezone.utc)
    devices = {
        (d.name, d.compute_capability, d.driver_version): ProvingDevice(
            name=d.name, compute_capability=d.compute_capability, driver=d.driver_version
        )
        for d in verdict.devices
    }
    return Proof(
        proved=not reasons,
        not_proved=reasons,
        run=run_id,
        date=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        granularity=verdict.granularity,
        copies=verdict.copies,
        fill=verdict.fill,
        tests=dict(sorted(outcomes.items())),
        parts=verdict.parts,
        devices=tuple(devices[key] for key in sorted(devices, key=str)),
        versions=verdict.versions,
    )


def _why_pages_unproved(rows: Iterable[LockedLibrary], verdict: Verdict | None) -> tuple[str, ...]:
    if verdict is None or verdict.cpu_reasons is None:
        return _NOT_VERIFIED
    twice = {row.sha256 for row in verdict.libraries if row.pages is not None}
    return verdict.cpu_reasons or tuple(
        f"{row.path}: one of the two runs alone loaded it"
        for row in rows
        if row.pages and row.sha256 not in twice
    )


def _totals(plan: LibraryPlan) -> dict[str, Any]:
    """The sums of a plan, as ``LockedLibrary`` names them."""
    return {
        "elements": len(plan.decisions),
        "kept_elements": sum(d.kept for d in plan.decisions),
        "code_bytes": plan.code_bytes,
        "unused_bytes": plan.unused_bytes,
        "trimmed_bytes": sum(cubin.unused_size for cubin in plan.trimmed),
    }


def _check_totals(locked: LockedLibrary, plan: LibraryPlan) -> None:
    """Compare the totals of the lock with those of the library.

    Raises:
        ReconstructError: one differs.
    """
    for name, found in _totals(plan).items():
        stated = getattr(locked, name)
        if stated != found:
            raise ReconstructError(
                f"{plan.library.path}: the lock says {name} is {stated:,}, and the library has "
                f"{found:,}; make the lock again"
            )


def _decide(span: tuple[int, int], kept: Mapping[int, KeptCode]) -> Decision:
    code = kept.get(span[0])
    if code is None:
        return Decision(*span, False, UnusedReason.NO_USED_KERNEL.value)
    return Decision(*span, True, code.reason.value, code.detail)


def _trimmed(code: KeptCode, block: Element, library_map: LibraryMap) -> TrimmedCubin | None:
    """The unused code of a cubin, found again from the functions that stay."""
    if code.functions is None:
        return None
    where = f"{library_map.library.path}: the cubin at {code.offset:#x}"
    content = block.content
    if not isinstance(content, Cubin):
        reason = block.unreadable or "it holds no machine code"
        raise ReconstructError(f"{where} can't be read: {reason}")
    names = library_map.names
    functions = {names[f.name]: f.name for f in content.functions}
    if missing := [name for name in code.functions if name not in functions]:
        raise ReconstructError(f"{where} has no function {missing[0]}; make the lock again")
    # Whatever the kept functions reach was kept, too: else the lock is not what we wrote.
    found = reachable_code(content, [functions[name] for name in code.functions])
    if isinstance(found, str) or {names[i] for i in found.kept} != set(code.functions):
        raise ReconstructError(
            f"{where}: the functions that the lock keeps are not all that they need; make the "
            "lock again"
        )
    return TrimmedCubin(
        start=code.offset, kept=code.functions, code_size=found.code_size, unused=found.unused
    )
