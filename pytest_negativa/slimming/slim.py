"""``negativa slim``: makes the libraries of folders smaller. The entry to this package."""

from __future__ import annotations

from pytest_negativa.models.slimming import PROBLEMS, UNMET
from pytest_negativa.slimming.request import (
    OnProgress,
    SlimReport,
    SlimRequest,
    refuse_contradictions,
)
from pytest_negativa.slimming.scan import open_journals, roots_of
from pytest_negativa.slimming.slimmer import apply
from pytest_negativa.slimming.worklist import find_work


def slim_trees(
    request: SlimRequest,
    on_progress: OnProgress = lambda done, total: None,
) -> SlimReport:
    """Slim libraries: list and hold their folders, find the work, and do it.

    Args:
        request: what to slim, and how.
        on_progress: told of the work.

    Raises:
        OptionError: the request contradicts itself; nothing was done.
        NegativaError: a folder can't be read or written. What was done stays done, and the same
            call does the rest.
    """
    roots = roots_of(request.paths)
    refuse_contradictions(request, roots)
    with open_journals(request.paths, dry_run=request.options.dry_run) as journals:
        work, unmet = find_work(journals, request)
        if request.require:
            # They won't become what the lock wants.
            known = (row for folder in work for row in folder.rows)
            missed = (*unmet, *(row for row in known if row.status in PROBLEMS | UNMET))
            if missed:
                return SlimReport(missed, stopped=True)
        return apply(work, unmet, request.options, on_progress)
