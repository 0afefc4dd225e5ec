"""What a traced run loaded besides the libraries that something was planned for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from pytest_negativa.errors import FormatError, NotElfError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.models.library import LibraryIdentity, Scope
from pytest_negativa.models.located import may_be
from pytest_negativa.models.lock import LeftOut
from pytest_negativa.models.trace import CHILDREN_UNTRACED, TracedLibrary, Usage
from pytest_negativa.slimming.tree import soname_of


def find_unplanned(
    usage: Usage | None, planned: Collection[LibraryIdentity]
) -> tuple[list[LeftOut], tuple[str, ...]]:
    """The other libraries of a run that have, or may have, GPU code; and why there may be more.

    Args:
        usage: of the run, if it is known.
        planned: the libraries that are in its plan.
    """
    if usage is None:
        return [], ("the run has no usage.json, which tells what it loaded",)
    paths = {library.path for library in planned}
    others = dict.fromkeys(
        used.library.path
        for used in usage.libraries
        if used.library.path not in paths and not _is_planned_copy(used.library, planned)
    )
    found = ((path, _why_unplanned(Path(path))) for path in others)
    unplanned = [
        LeftOut(path=path, soname=soname_of(Path(path)), reason=reason)
        for path, reason in found
        if reason is not None
    ]
    return unplanned, tuple(dict.fromkeys(_incomplete_reasons(usage)))


def _is_planned_copy(traced: TracedLibrary, planned: Collection[LibraryIdentity]) -> bool:
    """Whether a file that is gone was a copy of a planned library, which has its uses."""
    is_known = traced.sha256 is not None or traced.build_id is not None
    is_gone = not Path(traced.path).exists()
    return is_gone and is_known and any(may_be(traced, library) for library in planned)


def _incomplete_reasons(usage: Usage) -> Iterator[str]:
    for warning in usage.incomplete:
        yield warning.text
    for warning in usage.warnings:
        # The plan is complete all the same, for its proof ran the children, too.
        if warning.code == CHILDREN_UNTRACED:
            yield warning.text
    yield from usage.why_unended()


def _why_unplanned(path: Path) -> str | None:
    """Why nothing was planned for a library with GPU code; None for one without."""
    if not path.is_file():
        return "it is gone since the run" if ".so" in path.name else None
    if is_slimmed(path):
        return "it is slimmed already"
    try:
        library_map = read_library(path, Scope(headers_only=True))
    except NotElfError:
        return None
    except FormatError as e:
        return f"it cannot be read: {e.problem}"
    return (
        "not looked at, by libraries.include or libraries.exclude" if library_map.sections else None
    )
