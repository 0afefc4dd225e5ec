"""The end of a run, for the plugin and the command alike: usage to files and report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from pytest_negativa.analysis.analyze import Hooks, analyze, with_warning
from pytest_negativa.analysis.baseline import make_baseline
from pytest_negativa.analysis.report import build_report
from pytest_negativa.errors import StoreError
from pytest_negativa.gpucode.workers import Workers
from pytest_negativa.hostcode.by_tests import functions_by_group
from pytest_negativa.hostcode.gather import gather_by_test
from pytest_negativa.models.analysis import Analysis, ReportContents
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.settings import ReportFormat, Reports, Settings
from pytest_negativa.models.trace import ImageUse, Usage
from pytest_negativa.reporting.formats import render_to_files
from pytest_negativa.reporting.next_command import next_line
from pytest_negativa.reporting.text import path_for_people
from pytest_negativa.storage.output import append_output, write_output
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.results import (
    load_healed,
    load_history,
    load_opened,
    load_page_verdict,
    load_tests,
    write_run,
)
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.urls import Url

_NOT_PLANNED = "nothing is planned from this run: {failure}"


def plan_run(
    usage: Usage,
    settings: Settings,
    run: Run,
    *,
    failure: str | None,
    hooks: Hooks | None = None,
    workers: Workers | None = None,
    anew: bool = False,
    appends: bool = True,
    latest: bool = True,
    on_done: Callable[[int, int], None] | None = None,
) -> ReportContents:
    """Analyze a run, write its files and reports, and return what there is to show.

    Args:
        run: the run.
        failure: why no plans and spans are written; None if the run ended well.
        hooks: what plugins contribute.
        workers: who reads libraries; see ``map_libraries``.
        anew, appends: see ``write_reports``.
        latest: see ``write_run``.

    Raises:
        NegativaError: something could not be written.
    """
    if failure is not None:
        run.mark_failed(failure)
    analysis = analyze(
        usage,
        settings,
        hooks,
        healed=load_healed(run),
        watched=load_opened(run),
        workers=workers,
        on_done=on_done,
    )
    if failure is not None:
        analysis = with_warning(analysis, _NOT_PLANNED.format(failure=failure))
    if (partial := run.partial_reason) is not None:
        analysis = with_warning(analysis, f"{partial}; these plans make nothing smaller")
    report = write_results(run, analysis, settings, with_plans=failure is None, latest=latest)
    contents = ReportContents(report, analysis.libraries, analysis.usage)
    write_reports(contents, settings.reports, run, anew=anew, appends=appends)
    return contents


def write_results(
    run: Run,
    analysis: Analysis,
    settings: Settings,
    *,
    with_plans: bool = True,
    latest: bool = True,
    part: str | None = None,
) -> RunReport:
    """Write what was found into a run's folder, with its report.

    Args:
        with_plans, latest: see ``write_run``.
        part: see ``RunReport``.

    Raises:
        StoreError: a file can't be written.
    """
    files = write_run(run, analysis, with_plans=with_plans, latest=latest)
    report = build_report(
        analysis,
        settings,
        run_id=run.run_id,
        directory=path_for_people(run.folder),
        files=(*files, run.report_file.name),
        part=part,
    )
    write_record(run.report_file, report, indent=1)
    return report


def write_reports(
    contents: ReportContents,
    options: Reports,
    run: Run,
    *,
    anew: bool = False,
    appends: bool = True,
) -> None:
    """Write the reports that are files.

    Args:
        contents: what they show.
        options: which ones.
        run: the run, whose tests and forerunners a page shows.
        anew: they were written before. Devices, pipes and files that reports are appended to have
            had theirs.
        appends: whether to write reports that go to the end of a file.

    Raises:
        StoreError: one can't be written.
    """
    if any(wanted.format is ReportFormat.HTML for wanted in options.formats):
        contents = dataclasses.replace(
            contents,
            tests=load_tests(run),
            history=load_history(run),
            next_command=next_line(run).removeprefix("Next: "),
        )
        if (pages := gather_by_test(run)) is not None:
            contents = dataclasses.replace(
                contents,
                host=pages.usage,
                functions=functions_by_group(pages.by_test, lambda test: (test,)),
                host_verdict=load_page_verdict(run),
            )
    if any(wanted.format is ReportFormat.BASELINE for wanted in options.formats):
        if not contents.libraries:
            raise StoreError(f"{run}: no baseline: {run.why_unplanned()}")
        baseline = make_baseline(run.run_id, contents.libraries)
        contents = dataclasses.replace(contents, baseline=baseline)
    for file in render_to_files(contents, options):
        if file.is_appended:
            if appends and not anew:
                append_output(file.path, file.make)
        elif not anew or _can_be_replaced(file.path):
            write_output(file.path, file.make(0))


def _can_be_replaced(path: Path | Url) -> bool:
    return isinstance(path, Url) or (path.is_file() and not path.is_relative_to("/dev"))


def killed_process(usage: Usage) -> str | None:
    """Why a run failed that a signal ended; None if each process ended by itself.

    A test may kill a child process, so the children of the session don't count.
    """
    for process in usage.processes:
        if not process.ended and process.header.role.runs_tests:
            return f"process {process.header.pid} did not end by itself"
    return None


def describe_late_uses(reported: Usage, complete: Usage) -> tuple[str, ...]:
    """What the complete trace has, and the trace of the report had not."""
    known = _describe_uses(reported)
    return tuple(text for use, text in _describe_uses(complete).items() if use not in known)


def _describe_uses(usage: Usage) -> dict[tuple[object, ...], str]:
    """All uses: in words, by what they are."""
    images: list[tuple[str, object, ImageUse]] = [
        (library.library.path, (library.library.path, image.offset), image)
        for library in usage.libraries
        for image in library.images
    ]
    images += [("memory", i.sha256, i) for i in (*usage.memory_images, *usage.compiled)]
    uses: dict[tuple[object, ...], str] = {
        (
            "device",
            device.compute_capability,
        ): f"a GPU of compute capability {device.compute_capability}"
        for device in usage.devices
    }
    uses |= {
        (library.library.path, image.offset, "prelinked", offset): f"code in {library.library.path}"
        for library in usage.libraries
        for image in library.images
        for offset in image.prelinked
    }
    for name, place, image in images:
        if image.whole:
            uses[place, "image"] = f"code in {name}"
        for kernel, first in image.kernels.items():
            uses[place, "kernel", kernel] = f"kernel {kernel} ({usage.context_of(first)})"
        for data in image.data:
            uses[place, data.kind, data.name] = f"variable {data.name} in {name}"
        for call in image.enumerated_by:
            uses[place, "call", call] = f"all code of an image in {name} ({call})"
    uses.update({("incomplete", warning.text): warning.text for warning in usage.incomplete})
    return uses
