"""Files that are GPU code themselves: which of the unused ones did a process open in the rounds?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.spans import Span
from pytest_negativa.models.verdict import LibraryStatus, ProvedLibrary
from pytest_negativa.processes.file_users import Opens
from pytest_negativa.reporting.units import format_names

_INSTALLED_ANEW = "its RECORD is another one than when it was traced"


def unused_paths(plan: LibraryPlan) -> dict[str, Span]:
    """By real path: the unused files of a distribution, and where each is in its library."""
    site = plan.library.path.rpartition("/")[0]
    return {f"{site}/{d.detail}": Span(d.start, d.end) for d in plan.decisions if not d.kept}


def judge_files(
    plans: Sequence[LibraryPlan], rounds: Sequence[Opens], installed: Collection[tuple[str, str]]
) -> Iterator[ProvedLibrary]:
    """Rows of the files that the traced run did not open, from what the rounds opened.

    Nothing replaces the files: a program that opens one gets it, and the file is needed from then
    on. So the tests can't fail for lack of a file, and the watch alone is the proof.

    Args:
        plans: what was planned for the files of each distribution.
        rounds: what was seen in each round, whether on copies or on the originals.
        installed: what is there now: path and digest of each distribution's files as a library.
    """
    # A lock can't tell two folders with the same files apart.
    opened: defaultdict[str | None, set[Span]] = defaultdict(set)
    for plan in plans:
        paths = unused_paths(plan)
        opened[plan.library.sha256] |= {paths[p] for o in rounds for p in o.times if p in paths}
    for plan in plans:
        library, paths = plan.library, unused_paths(plan)
        unseen = [] if (library.path, library.sha256) in installed else [_INSTALLED_ANEW]
        unseen += [o.unseen[p] for o in rounds for p in o.unseen if p in paths]
        stays = opened[library.sha256]
        spans = tuple(span for span in paths.values() if span not in stays)
        status, detail = LibraryStatus.PROVED, None
        notes: tuple[str, ...] = ()
        if unseen:
            detail = f"all files are kept: nothing tells what the tests opened: {unseen[0]}"
            status = LibraryStatus.NOT_PROVED
        elif not paths:
            status = LibraryStatus.NOTHING_UNUSED
        if stays:
            names = (str(d.detail) for d in plan.decisions if (d.start, d.end) in stays)
            notes = (f"opened while the tests ran on the copies, so kept: {format_names(names)}",)
        unused = sum(span.size for span in spans)
        yield replace(
            ProvedLibrary.unproved(plan),
            status=status,
            detail=detail,
            unused_bytes=unused,
            unused_elements=len(spans),
            left_bytes=plan.code_bytes - unused,
            spans=spans,
            notes=notes,
        )
