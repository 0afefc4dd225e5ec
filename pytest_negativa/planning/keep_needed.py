"""Plans that keep more: elements and frames that were seen to be needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec.structs import replace

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import Element, LibraryMap
from pytest_negativa.models.plan import KeepReason, LibraryPlan, UnusedReason
from pytest_negativa.models.verdict import Need


def iter_removed(library_map: LibraryMap, plan: LibraryPlan) -> Iterator[Element]:
    """The elements and frames that a plan calls unused, or takes code out of."""
    removed = {d.start for d in plan.decisions if not d.kept and d.size}
    removed.update(cubin.start for cubin in plan.trimmed)
    return (block for block in library_map.iter_code() if block.payload.start in removed)


def find_needed(planned: Iterable[AnalyzedLibrary], needs: Collection[Need]) -> Iterator[Need]:
    """The removed elements and frames that needs are about, to be kept, each with the first one.

    An image is a region, or an element or frame itself.
    """
    for one in planned:
        plan, named = one.plan, [n for n in needs if n.library == one.plan.library.path]
        # The driver would never choose them. What was touched itself is needed all the same.
        other = {d.start for d in plan.decisions if d.reason == UnusedReason.WRONG_ARCH.value}
        for block in iter_removed(one.library_map, plan) if named else ():
            start, names = block.payload.start, one.library_map.functions_of(block.content)
            images = {hex(start)} if start in other else {hex(start), hex(block.anchor), None}
            for need in named:
                if need.image in images and (need.kernel is None or need.kernel in names):
                    yield replace(
                        need, sha256=plan.library.sha256, spans=(block.payload,), kept=True
                    )
                    break


def keeps_more(plan: LibraryPlan, other: LibraryPlan) -> frozenset[int]:
    """Starts of the elements and frames of which a plan keeps more than the other one.

    A cubin that lost the wrong function was another program to the driver.
    """
    removed = {d.start for d in other.decisions if not d.kept and d.size}
    own, others = ({c.start: {*c.kept} for c in one.trimmed} for one in (plan, other))
    removed.update(s for s, kept in others.items() if s not in own or not own[s] <= kept)
    return frozenset(d.start for d in plan.decisions if d.kept and d.start in removed)


def keep_needed(plan: LibraryPlan, needs: Iterable[Need]) -> LibraryPlan:
    """The plan with the spans of needs kept as a whole, for the reasons that these name.

    Needs of other libraries are ignored.
    """
    own = (need for need in needs if need.is_of(plan.library))
    why = {span.start: need.reason for need in own for span in need.spans}
    return keep(plan, why, KeepReason.HEALED)


def keep(plan: LibraryPlan, why: Mapping[int, str], reason: KeepReason) -> LibraryPlan:
    """The plan with elements and frames kept as a whole: details by their start."""
    return replace(
        plan,
        decisions=tuple(
            replace(d, kept=True, reason=reason.value, detail=why[d.start]) if d.start in why else d
            for d in plan.decisions
        ),
        trimmed=tuple(cubin for cubin in plan.trimmed if cubin.start not in why),
    )
