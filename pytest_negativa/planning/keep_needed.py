"""Plans that keep more: elements and frames that were seen to be needed (healing)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from pytest_negativa.models.library import Element, LibraryIdentity, LibraryMap
from pytest_negativa.models.plan import KeepReason, LibraryPlan
from pytest_negativa.models.trace import TracedLibrary
from pytest_negativa.models.verdict import NeededSpan


def iter_removed(library_map: LibraryMap, plan: LibraryPlan) -> Iterator[Element]:
    """The elements and frames that a plan calls unused, or takes code out of."""
    removed = {d.start for d in plan.decisions if not d.kept and d.size}
    removed.update(cubin.start for cubin in plan.trimmed)
    return (block for block in library_map.iter_code() if block.payload.start in removed)


def keep_needed_spans(plan: LibraryPlan, spans: Iterable[NeededSpan]) -> LibraryPlan:
    """The plan with the spans kept as a whole, for the reasons that they name.

    A cubin that lost the wrong function was another program to the driver, so it gets all of them
    back. Spans of other libraries are ignored.
    """
    why = {span.start: span.detail for span in spans if span.library == plan.library.path}
    return replace(
        plan,
        decisions=tuple(
            replace(d, kept=True, reason=KeepReason.HEALED.value, detail=why[d.start])
            if d.start in why
            else d
            for d in plan.decisions
        ),
        trimmed=tuple(cubin for cubin in plan.trimmed if cubin.start not in why),
    )


def of_each_path(
    spans: Iterable[NeededSpan], libraries: Iterable[LibraryIdentity | TracedLibrary]
) -> tuple[NeededSpan, ...]:
    """The spans, and the same ones of other paths with the same content: that is one library.

    Args:
        libraries: all of them; a path may have had several contents.
    """
    known = {(one.path, one.sha256) for one in libraries if one.sha256 is not None}
    alike: defaultdict[str, set[str]] = defaultdict(set)
    for path, sha256 in known:
        alike[path].update(other for other, same in known if same == sha256)
    of_all = [
        replace(span, library=path)
        for span in spans
        for path in sorted({span.library, *alike[span.library]})
    ]
    return tuple({(span.library, span.start): span for span in of_all}.values())
