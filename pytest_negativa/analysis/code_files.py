"""The files of a run that are GPU code themselves: from what was opened to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.code_files import CODE_FILES_VERSION, FilesPlan, OpenedFiles
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.trace import Usage
from pytest_negativa.planning.code_files import plan_files, unite
from pytest_negativa.storage.atomic import remove_file
from pytest_negativa.storage.results import load_opened, save_files_plans, save_opened
from pytest_negativa.storage.runs import Run


def plan_code_files(
    run: Run, usage: Usage, settings: Settings, *, with_plans: bool
) -> tuple[FilesPlan, ...]:
    """Plan the files of a run, and write the plan.

    Args:
        with_plans: False for a run that must not feed a plan.

    Raises:
        StoreError: what was opened can't be read, or the plan can't be written.
    """
    opened = load_opened(run)
    remove_file(run.files_plan_file)
    if opened is None:
        return ()
    images = (*usage.memory_images, *usage.compiled)
    digests: set[str | None] = {image.sha256 for image in images}
    # The file may lie in another environment, which nothing watched.
    digests |= {used.library.sha256 for used in usage.libraries if used.images}
    loaded = {record_digest(sha256) for sha256 in digests if sha256 is not None}
    incomplete = _why_incomplete(usage)
    plans = tuple(plan_files(opened.distributions, usage, settings, incomplete, loaded))
    if with_plans and plans:
        save_files_plans(run, plans)
    return plans


def _why_incomplete(usage: Usage) -> str | None:
    """Why the run may need files that it did not open; None if it doesn't."""
    for warning in usage.incomplete:
        return warning.text
    for process in usage.processes:
        if not process.ended and process.header.role.runs_tests:
            return f"the trace of process {process.header.pid} has no end"
    return None


def combine_opened(run: Run, parts: Sequence[Run]) -> None:
    """Note in a run what any of its parts opened. If one did not watch, all files stay.

    Raises:
        StoreError: a part's note can't be read, or the run's can't be written.
    """
    found = [opened for part in parts if (opened := load_opened(part)) is not None]
    if len(found) == len(parts) and found:
        distributions = unite([opened.distributions for opened in found])
        opened = OpenedFiles(format_version=CODE_FILES_VERSION, distributions=distributions)
        save_opened(run, opened)
