"""Keeps parts of a plan that were seen to be needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.models.library import Cubin, LibraryIdentity, LibraryMap
from pytest_negativa.models.plan import Decision, KeepReason, LibraryPlan, TrimmedCubin
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import TracedLibrary
from pytest_negativa.models.verdict import NeededSpan


class Part(NamedTuple):
    """The smallest amount of code that can be given back.

    Attributes:
        library: real path.
        region: file offset of the region that holds it; that of a frame itself.
        start: file offset of the element's payload or of the frame.
        code: for code inside a kept cubin its offset in the unpacked cubin; None for all of it.
    """

    library: str
    region: int
    start: int
    code: int | None


def iter_parts(library_map: LibraryMap, plan: LibraryPlan) -> Iterator[Part]:
    """All code that a plan calls unused, part by part."""
    path = plan.library.path
    anchors = {block.payload.start: block.anchor for block in library_map.iter_code()}
    for decision in plan.decisions:
        if not decision.kept and decision.size:
            yield Part(path, anchors[decision.start], decision.start, None)
    for cubin in plan.trimmed:
        anchor = anchors[cubin.start]
        yield from (Part(path, anchor, cubin.start, code.start) for code in cubin.unused)


def keep_needed_spans(plan: LibraryPlan, spans: Iterable[NeededSpan]) -> LibraryPlan:
    """The plan with what healing gave back kept, for the reasons that the spans name.

    Spans of other libraries are ignored.
    """
    own = [span for span in spans if span.library == plan.library.path]
    whole = {span.start: span.detail for span in own if span.code is None}
    codes = {(span.start, span.code) for span in own}
    return replace(
        plan,
        decisions=tuple(
            _kept(d, whole[d.start]) if d.start in whole else d for d in plan.decisions
        ),
        trimmed=tuple(
            trimmed for cubin in plan.trimmed if (trimmed := _trim_less(cubin, codes)).unused
        ),
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
    return tuple({(span.library, span.start, span.code): span for span in of_all}.values())


def _kept(decision: Decision, detail: str) -> Decision:
    return replace(decision, kept=True, reason=KeepReason.HEALED.value, detail=detail)


def _trim_less(cubin: TrimmedCubin, codes: Collection[tuple[int, int | None]]) -> TrimmedCubin:
    return replace(
        cubin, unused=tuple(c for c in cubin.unused if (cubin.start, c.start) not in codes)
    )


def functions_of(library_map: LibraryMap, start: int, code: Span) -> tuple[str, ...]:
    """Mangled names of the functions of a cubin that lie in ``code``."""
    content = next((b.content for b in library_map.iter_code() if b.payload.start == start), None)
    if not isinstance(content, Cubin):
        return ()
    return tuple(
        library_map.names[f.name]
        for f in (*content.kernels, *content.device_functions)
        if code.start <= f.offset_in_cubin < code.end
    )
