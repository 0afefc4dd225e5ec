"""The same work as when traced: kernels, images, children, launches, refusals; what may stay.

A test that catches an error and goes on without the GPU passes on broken copies. But then it no
longer uses code that it used when traced. The union over all processes and rounds is compared: with
pytest-xdist, which test is the first to use a kernel depends on the order of tests.

What the driver refused on the copies alone was needed there, whatever the test made of the error.

Some work is not repeated in each run: autotuning, memos on disk, cold caches. A traced run that
watched its pages is a witness of its own: what no process read, none needed. So such work speaks
against nothing if all that could have gone for it stays: the images that it used, and every element
that was not watched.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.reconstruction import ReconstructedLibrary, Reconstruction
from pytest_negativa.models.spans import MovedSpan, Span, covers, minus
from pytest_negativa.models.trace import (
    LAUNCHES_CUT,
    Context,
    ImageUse,
    Phase,
    Role,
    Usage,
    UsageProcess,
)
from pytest_negativa.models.verdict import Need, Witness
from pytest_negativa.planning.keep_needed import iter_removed, keep_needed
from pytest_negativa.reporting.units import format_names
from pytest_negativa.verifying.evidence import Attempt
from pytest_negativa.verifying.process_ends import command_of

# Of the words of a child's command, characters.
_MAX_COMMAND = 200

# Usage doesn't tell who looked a variable up, or enumerated an image.
_UNKNOWN = Context(phase=Phase.PROCESS, detail="an unknown test")

# CUresult in cuda.h of a process's state: memory, devices, contexts, faults of earlier launches.
_OF_STATE = frozenset({2, 3, 4, 46, 100, 101, 201, 304, 600, 999}).union(
    range(700, 722), range(802, 811), range(900, 912)
)


@dataclass(frozen=True, slots=True)
class Use:
    """A symbol that was looked up, an image without look-ups, or a child's use of the GPU.

    Each is named alike in every run.

    Attributes:
        library: real path of the original if it has a copy, else the file's name; None for an
            image that lay in memory only.
        image: file offset in the original, or SHA-256; None if ``kernel`` tells enough.
        kernel: mangled name of a kernel or variable, or what else was done.
    """

    library: str | None
    image: int | str | None
    kernel: str | None


class Places:
    """Names places in copies by those in the originals."""

    def __init__(self, reconstruction: Reconstruction) -> None:
        # One name for each file: the loader maps hard links once, under the name that came first.
        self._names = {path: names[0] for path, names in reconstruction.hard_links.items()}
        self._copies = {c.copy: c for c in reconstruction.libraries}

    def find(self, path: str, offset: int) -> tuple[str, int]:
        """The original, and the offset in it, of an offset in a mapped file.

        A library without a copy goes by its file name: a test may build or copy it into another
        folder in every run.
        """
        copy = self._copies.get(path)
        if copy is None:
            return self._names.get(path) or Path(path).name, offset
        if copy.compaction is not None:
            offset = _moved_back(copy.compaction.kept, offset)
        return self._names[copy.library.path], offset


def _moved_back(kept: Sequence[MovedSpan], offset: int) -> int:
    """The original's offset of an offset in a compacted copy; -1 for bytes of the copy's own."""
    part = kept[bisect_right(kept, offset, key=lambda k: k.target) - 1]
    inside = offset - part.target
    return part.start + inside if 0 <= inside < part.end - part.start else -1


def uses_of(
    usage: Usage, places: Places, sessions: Collection[tuple[str, ...]] = ()
) -> dict[Use, Context]:
    """Uses, each with its first context.

    An image counts by its kernels, or by itself if no look-up was seen: cuFFT loads modules and
    gets their kernels in a way that CUPTI doesn't show. An image in memory counts by its kernels,
    because trimming changes its content. What the driver's linker was given counts by the result.

    Args:
        sessions: see ``command_of``.
    """
    uses: dict[Use, Context] = {}
    for library in usage.libraries:
        for image in library.images:
            name, offset = places.find(library.library.path, image.offset)
            for kernel, first in image.kernels.items():
                uses[Use(name, offset, kernel)] = usage.context_of(first)
            for symbol in _symbols_of(image):
                uses.setdefault(Use(name, offset, symbol), _UNKNOWN)
            if not image.kernels:
                uses[Use(name, offset, None)] = usage.context_of(image.first)
    for memory in (*usage.memory_images, *usage.compiled):
        for kernel, first in memory.kernels.items():
            uses.setdefault(Use(None, None, kernel), usage.context_of(first))
        for symbol in _symbols_of(memory):
            uses.setdefault(Use(None, None, symbol), _UNKNOWN)
    for memory in usage.memory_images:
        if not memory.kernels:
            uses[Use(None, memory.sha256, None)] = usage.context_of(memory.first)
    # A child that went on without the GPU, while another process used the same kernels.
    for child in _gpu_children(usage):
        program, *words = command_of(child.header, sessions)
        command = " ".join((Path(program).name, *words))[:_MAX_COMMAND]
        context = child.last or Context(phase=Phase.PROCESS)
        uses.setdefault(Use(None, None, f"the GPU by {command}"), context)
    return uses


def _symbols_of(image: ImageUse) -> Iterator[str]:
    """What else than kernels was asked for in an image, for people."""
    yield from (*image.data, *image.functions)
    yield from (f"all kernels, by {call}," for call in image.enumerated_by)


def _gpu_children(usage: Usage) -> Iterator[UsageProcess]:
    """The child processes that loaded GPU code."""
    images = (*chain(*(one.images for one in usage.libraries)), *usage.memory_images)
    for number in sorted({number for image in images for number in image.processes}):
        if usage.processes[number].header.role is Role.CHILD:
            yield usage.processes[number]


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one run or process.

    Attributes:
        used: each use, and where it was seen first.
        images: images of libraries that were loaded.
        launched: kernels by test, see ``launches_of``.
        cut: tests whose children were killed, so that their last launches are not known.
        refused: see ``refusals_of``.
    """

    used: Mapping[Use, Context]
    images: Set[Use]
    launched: Mapping[str, Set[str]]
    cut: Set[str]
    refused: Mapping[tuple[str, Use], tuple[int, Context]]

    @classmethod
    def of(cls, usage: Usage, places: Places, sessions: Collection[tuple[str, ...]] = ()) -> Work:
        """The work that a usage tells of.

        Args:
            sessions: see ``command_of``.
        """
        return cls(
            uses_of(usage, places, sessions),
            {
                Use(*places.find(one.library.path, image.offset), None)
                for one in usage.libraries
                for image in one.images
            },
            launches_of(usage),
            {
                last.place
                for warning in usage.warnings
                if warning.code == LAUNCHES_CUT
                and warning.process is not None
                and (last := usage.processes[warning.process].last) is not None
            },
            refusals_of(usage, places),
        )


def launches_of(usage: Usage) -> dict[str, set[str]]:
    """Launched kernels by test, or by the phase of the session outside of tests."""
    launched: dict[str, set[str]] = defaultdict(set)
    for name, row in usage.iter_launches():
        launched[usage.contexts[row.context].place].add(name)
    return launched


def refusals_of(usage: Usage, places: Places) -> dict[tuple[str, Use], tuple[int, Context]]:
    """By driver call and what it was about: the error, and where the driver refused it first."""
    refused = {}
    for refusal in usage.refusals:
        if refusal.code in _OF_STATE:
            continue
        use = Use(None, None, refusal.name)
        if refusal.path is not None and refusal.offset is not None:
            use = Use(*places.find(refusal.path, refusal.offset), refusal.name)
        refused[refusal.call, use] = refusal.code, usage.context_of(refusal.first)
    return refused


def refused_work(traced: Work, copies: Work) -> tuple[Need, ...]:
    """Refusals of the driver on the copies that the traced run did not have."""
    return tuple(
        Need(
            witness=Witness.REFUSED,
            library=use.library,
            image=f"{use.image:#x}" if isinstance(use.image, int) else None,
            kernel=use.kernel,
            test=str(context),
            nodeid=context.nodeid,
            note=f"{call} ended with error {code}",
        )
        for (call, use), (code, context) in copies.refused.items()
        if (call, use) not in traced.refused and (use.library or use.kernel)
    )


def compare_work(
    traced: Work, copies: Work, flaky: Collection[str], *, launches: bool
) -> tuple[Need, ...]:
    """Work of the traced run that is missing on the copies.

    Args:
        flaky: tests whose launches are not asked for.
        launches: compare launched kernels, too.
    """
    found = [
        Need(
            witness=Witness.NOT_USED,
            library=use.library,
            image=f"{use.image:#x}" if isinstance(use.image, int) else use.image,
            kernel=use.kernel,
            test=str(context),
            nodeid=context.nodeid,
        )
        for use, context in traced.used.items()
        if use not in copies.used and use not in copies.images
    ]
    may_vary = {*flaky, *traced.cut, *copies.cut}
    found += (
        Need(witness=Witness.NOT_LAUNCHED, kernel=kernel, test=test, nodeid=test)
        for test, kernels in traced.launched.items()
        if launches and test not in may_vary
        for kernel in sorted({*kernels}.difference(copies.launched.get(test, ())))
    )
    return tuple(sorted(found, key=lambda d: (d.library or "", d.test)))


def name_holders(work: Iterable[Need], planned: Collection[AnalyzedLibrary]) -> tuple[Need, ...]:
    """Add the library that holds a kernel to differences that don't tell it."""
    work = tuple(work)
    wanted = {d.kernel for d in work if d.library is None}
    holders: dict[str, str] = {}
    for one in planned if wanted else ():
        for block in one.library_map.iter_code():
            for kernel in one.library_map.kernels_of(block.content):
                if kernel.name in wanted:
                    holders.setdefault(kernel.name, one.plan.library.path)
    return tuple(d if d.library else replace(d, library=holders.get(d.kernel or "")) for d in work)


def reasons_of_work(work: Collection[Need], copies: Usage) -> Iterator[str]:
    """Reasons against a proof from the work that speaks against it."""
    for witness in Witness:
        if shown := [d for d in work if d.witness is witness]:
            yield _first_of(shown)
    if work and copies.incomplete:
        yield f"tracing on the copies was incomplete: {copies.incomplete[0].text}"


def details_by_library(work: Iterable[Need]) -> dict[str, str]:
    """By path or file name: what of a library was not used on the copies."""
    by_library: dict[str, list[Need]] = defaultdict(list)
    for difference in work:
        if difference.library is not None:
            by_library[difference.library].append(difference)
    return {library: _first_of(found) for library, found in by_library.items()}


def _first_of(work: Sequence[Need]) -> str:
    return f"{work[0].witness.value}: {format_names((one.detail for one in work), 1)}"


def what_stays(attempt: Attempt, work: Iterable[Need]) -> Iterator[Need]:
    """The removed code that must stay for the sake of work that was not repeated."""
    left_out = [d for d in work if d.witness is Witness.NOT_REPEATED]
    images, kernels = {d.image for d in left_out}, {d.kernel for d in left_out}
    untouched = {u.library.path: u.untouched for u in attempt.traced.usage.libraries}

    def stays(one: AnalyzedLibrary) -> Iterator[Span]:
        trimmed = {cubin.start: cubin.kept for cubin in one.plan.trimmed}
        for block in iter_removed(one.library_map, one.plan):
            kept = trimmed.get(block.payload.start)
            if kept is None:
                is_kept = not covers(untouched[one.plan.library.path], *block.payload)
            else:
                is_kept = not kernels.isdisjoint(kept) or hex(block.anchor) in images
            if is_kept:
                yield block.payload

    for one in attempt.planned if left_out else ():
        library = one.plan.library
        if library.path in attempt.traced.loaded and (spans := tuple(stays(one))):
            yield Need(
                witness=Witness.NOT_REPEATED,
                library=library.path,
                sha256=library.sha256,
                spans=spans,
                kept=True,
            )


def without(attempt: Attempt, kept: Collection[Need]) -> Attempt:
    """The attempt as if its copies still had this code: what ran with less proves that, too."""

    def give_back(copy: ReconstructedLibrary) -> ReconstructedLibrary:
        own = {span for n in kept if n.is_of(copy.library) for span in n.spans}
        whole = [span for span in sorted(own) if covers(copy.unused, *span)]
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
        plans=tuple(keep_needed(plan, kept) for plan in attempt.plans),
        reconstruction=replace(made, libraries=tuple(map(give_back, made.libraries))),
    )
