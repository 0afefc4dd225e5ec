"""Work of the traced run that the copies did not repeat: autotuning, memos on disk, cold caches.

A traced run that watched its pages is a witness of its own: what no process read, none needed. So
such work speaks against nothing if all that could have gone for it stays: the images that it used,
and every element that was not watched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from msgspec.structs import replace

from pytest_negativa.models.reconstruction import ReconstructedLibrary
from pytest_negativa.models.spans import covers, minus
from pytest_negativa.models.verdict import NEEDS, NeededSpan, WorkDifference, WorkKind
from pytest_negativa.planning.keep_needed import iter_removed, keep_needed_spans, of_each_path
from pytest_negativa.verifying.evidence import Attempt


def with_witness(work: Collection[WorkDifference]) -> tuple[WorkDifference, ...]:
    """The differences; those of which the traced run is a witness speak against nothing.

    It is one if it watched pages, loaded GPU code lazily, was traced to its end, and was started as
    the tests on the copies were.
    """
    return tuple(d if d.kind in NEEDS else replace(d, kind=WorkKind.NOT_REPEATED) for d in work)


def what_stays(attempt: Attempt, work: Collection[WorkDifference]) -> tuple[NeededSpan, ...]:
    """The removed code that must stay for the sake of work that was not repeated."""
    left_out = [d for d in work if d.kind is WorkKind.NOT_REPEATED]
    images, kernels = {d.image for d in left_out}, {d.kernel for d in left_out}

    def spans() -> Iterator[NeededSpan]:
        untouched = {u.library.path: u.untouched for u in attempt.traced.usage.libraries}
        tried = {plan.library.path: plan for plan in attempt.plans}
        for one in attempt.traced.planned:
            path = one.plan.library.path
            if path not in tried or path not in attempt.traced.loaded:
                continue
            trimmed = {cubin.start: cubin.kept for cubin in tried[path].trimmed}
            for block in iter_removed(one.library_map, tried[path]):
                start, end = block.payload
                if start not in trimmed:
                    stays = not covers(untouched[path], start, end)
                else:
                    is_used = not kernels.isdisjoint(trimmed[start])
                    stays = is_used or hex(block.anchor) in images
                if stays:
                    yield NeededSpan(
                        library=path, start=start, end=end, test="", found_by=WorkKind.NOT_REPEATED
                    )

    libraries = [one.plan.library for one in attempt.traced.planned]
    return of_each_path(spans(), libraries) if left_out else ()


def without(attempt: Attempt, stays: Collection[NeededSpan]) -> Attempt:
    """The attempt as if its copies still had this code: what ran with less proves that, too."""
    if not stays:
        return attempt

    def give_back(copy: ReconstructedLibrary) -> ReconstructedLibrary:
        own = sorted((s.start, s.end) for s in stays if s.library == copy.library.path)
        whole = [span for span in own if covers(copy.unused, *span)]
        unused = tuple(minus(copy.unused, whole))
        return replace(
            copy,
            unused=unused,
            unused_bytes=sum(span.size for span in unused),
            elements=copy.elements - len(whole),
            repacked=tuple(c for c in copy.repacked if c.start not in dict(own)),
        )

    made = attempt.reconstruction
    return dataclasses.replace(
        attempt,
        plans=tuple(keep_needed_spans(plan, stays) for plan in attempt.plans),
        reconstruction=replace(made, libraries=tuple(map(give_back, made.libraries))),
    )
