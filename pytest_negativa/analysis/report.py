"""The report of a run: its plans and rows, warnings, uses after the report; with other limits.

``RunReport`` is what all renderers share.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.combine import prove_by_parts
from pytest_negativa.analysis.limits import compare_with_baseline, find_crossed
from pytest_negativa.errors import StoreError
from pytest_negativa.gpucode.mapping import OnDone
from pytest_negativa.gpucode.workers import Workers
from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.analysis import Analysis, AnalyzedLibrary, ReportContents
from pytest_negativa.models.report import LibraryRow, RunReport
from pytest_negativa.models.settings import ReportFormat, Reports, Settings
from pytest_negativa.models.spans import intersection, size
from pytest_negativa.models.trace import UNENDED, Usage
from pytest_negativa.models.verdict import Need
from pytest_negativa.pages.gather import gather, with_pages, with_pages_of
from pytest_negativa.planning.decide import KeepElement
from pytest_negativa.reporting.formats import render_to_files, render_to_screen
from pytest_negativa.reporting.next_command import next_command
from pytest_negativa.reporting.rows import library_row, proof_row
from pytest_negativa.reporting.text import path_for_people
from pytest_negativa.reporting.verdict import describe_cpu
from pytest_negativa.settings.globs import limit_of, names_of
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.results import (
    load_healed,
    load_history,
    load_opened,
    load_planned,
    load_report,
    load_tests,
    load_usage,
    load_verdict,
    save_healed,
    write_run,
)
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.urls import Url
from pytest_negativa.storage.user_files import write_output
from pytest_negativa.tracing.merge import merge_when_ended


def plan_traces(
    traces: Sequence[Path],
    run: Run,
    settings: Settings,
    *,
    failure: str | None,
    healed: Iterable[Need] = (),
    parts: Sequence[Run] = (),
    workers: Workers,
    on_done: OnDone,
) -> ReportContents:
    """Merge the traces of a run that has ended, and plan it, see ``plan_run``.

    Args:
        healed: what healing gave back in the parts of a combined run.
    """
    usage = with_pages_of(with_pages(merge_when_ended(lambda: traces), run), parts)
    if healed:
        # In whatever order the parts are given.
        save_healed(run, sorted(healed, key=repr))
    contents = plan_run(
        usage,
        settings,
        run,
        failure=failure or usage.why_incomplete(UNENDED),
        workers=workers,
        on_done=on_done,
        parts=parts,
    )
    run.mark("incomplete", None)
    return contents


def plan_run(
    usage: Usage,
    settings: Settings,
    run: Run,
    *,
    failure: str | None,
    added: Sequence[str] = (),
    vetoes: tuple[KeepElement, ...] = (),
    workers: Workers | None = None,
    anew: bool = False,
    on_done: OnDone | None = None,
    parts: Sequence[Run] = (),
) -> ReportContents:
    """Analyze a run, write its files and reports, and return what there is to show.

    Args:
        run: the run.
        failure: why no plans and spans are written; None if the run ended well.
        added, vetoes: what plugins contribute, see ``analyze``.
        workers: who reads libraries; see ``map_libraries``.
        parts: the runs that it unites, which may prove it.
        anew: see ``write_reports``.

    Raises:
        NegativaError: something could not be written.
    """
    if failure is not None:
        run.mark("failed", failure)
    analysis = analyze(
        usage,
        settings,
        added=added,
        vetoes=vetoes,
        healed=load_healed(run),
        watched=load_opened(run),
        workers=workers,
        on_done=on_done,
    )
    warnings = [] if failure is None else [f"nothing is planned from this run: {failure}"]
    # Runs of other machines: is GPU code used of a library that is here?
    latest = not parts or any(u.images and Path(u.library.path).exists() for u in usage.libraries)
    if not latest:
        warnings.append(
            "this is not the last run: no library is here whose GPU code was used; name the "
            "folders of the libraries with --path or paths in negativa.yaml"
        )
    analysis = dataclasses.replace(analysis, warnings=(*analysis.warnings, *warnings))
    files = write_run(run, analysis, with_plans=failure is None, latest=latest)
    report = build_report(
        analysis,
        settings,
        run_id=run.run_id,
        directory=path_for_people(run.folder),
        files=(*files, run.report_file.name),
    )
    write_record(run.report_file, report, indent=1)
    verdict = prove_by_parts(run, analysis.libraries, parts) if failure is None else None
    if verdict is not None:
        report = replace(report, proof=proof_row(verdict))
    contents = ReportContents(report, analysis.libraries, analysis.usage)
    write_reports(contents, settings.reports, run, anew=anew)
    return contents


def write_reports(
    contents: ReportContents,
    options: Reports,
    run: Run,
    *,
    anew: bool = False,
) -> None:
    """Write the reports that are files.

    Args:
        contents: what they show.
        options: which ones.
        run: the run, whose tests and forerunners a page shows.
        anew: they were written before. Devices and pipes have had theirs.

    Raises:
        StoreError: one can't be written.
    """
    formats = {wanted.format for wanted in options.formats}
    if ReportFormat.HTML in formats:
        host, verdict = gather(run), load_verdict(run)
        contents = dataclasses.replace(
            contents,
            tests=load_tests(run),
            history=load_history(run),
            next_command=next_command(run),
            host=host,
            host_proof=None
            if host is None or verdict is None or verdict.cpu_reasons is None
            else describe_cpu(verdict),
        )
    if ReportFormat.BASELINE in formats and not contents.libraries:
        raise StoreError(f"{run}: no baseline: {run.why_unplanned()}")
    for path, data in render_to_files(contents, options):
        is_file = isinstance(path, Url) or (path.is_file() and not path.is_relative_to("/dev"))
        if is_file or not anew:
            write_output(path, data)


def describe_late_uses(reported: Usage, complete: Usage) -> tuple[str, ...]:
    """Uses in the complete trace that are not in the report's trace."""
    known = {use for _words, use in _uses(reported)}
    return tuple(dict.fromkeys(words for words, use in _uses(complete) if use not in known))


def _uses(usage: Usage) -> Iterator[tuple[str, object]]:
    """All uses: in words, and what was used where."""
    texts = [f"a GPU of compute capability {device.compute_capability}" for device in usage.devices]
    yield from ((text, text) for text in (*texts, *(one.text for one in usage.incomplete)))
    images = [("code in memory", i) for i in (*usage.memory_images, *usage.compiled)]
    libraries = [(f"code in {used.library.path}", used) for used in usage.libraries]
    images += [(place, image) for place, used in libraries for image in used.images]
    for place, image in images:
        where = place, image.offset, image.sha256
        whole = [True] if image.whole else []
        named = (*image.data, *image.functions, *image.enumerated_by)
        parts = (*whole, *named, *image.prelinked)
        yield from ((place, (where, part)) for part in parts)
        for kernel, first in image.kernels.items():
            yield f"kernel {kernel} ({usage.context_of(first)})", (where, "kernel", kernel)
    yield from ((place, (place, page)) for place, used in libraries for page in used.touched)


def build_report(
    analysis: Analysis,
    settings: Settings,
    *,
    run_id: str,
    directory: str,
    files: Sequence[str],
) -> RunReport:
    """Rows, totals and everything a reader must know, the largest libraries first."""
    usage = analysis.usage
    report = RunReport(
        run_id=run_id,
        directory=directory,
        devices=tuple(dict.fromkeys(f"{d.name} ({d.compute_capability})" for d in usage.devices)),
        replay=_replay_line(usage),
        gpu_used=any(True for _ in usage.iter_images()),
        libraries=rows_of(analysis.libraries),
        runtime=analysis.runtime,
        not_covered=(*dict.fromkeys(lack.text for lack in usage.incomplete), *analysis.unreadable),
        warnings=tuple(dict.fromkeys([*(w.text for w in usage.warnings), *analysis.warnings])),
        crossed=(),
        files=tuple(files),
        coverage=tuple(one.coverage for one in analysis.libraries if one.coverage is not None),
        unchecked=analysis.unchecked,
        watched_bytes=_watched_bytes(analysis),
    )
    return _compared(report, settings, usage, analysis.libraries)


def _watched_bytes(analysis: Analysis) -> int:
    untouched = {used.library.path: used.untouched for used in analysis.usage.libraries}
    unused = (
        (one.plan.library.path, d.start, d.end)
        for one in analysis.libraries
        for d in one.plan.decisions
        if not d.kept
    )
    return size(
        watched
        for path, start, end in unused
        for watched in intersection([(start, end)], untouched.get(path, ()))
    )


def _compared(
    report: RunReport, settings: Settings, usage: Usage, libraries: Sequence[AnalyzedLibrary]
) -> RunReport:
    """The report, compared with all limits of the settings, and with the baseline."""
    growth = compare_with_baseline(report, libraries, settings.compare)
    crossed = tuple(find_crossed(settings, usage, report, libraries, growth.crossed))
    warnings = tuple(text for text in report.warnings if text not in crossed)
    return replace(report, crossed=crossed, compared=growth.lines, warnings=warnings)


def rows_of(libraries: Iterable[AnalyzedLibrary]) -> tuple[LibraryRow, ...]:
    """A row for each library, the most unused bytes first."""
    rows = (
        replace(library_row(one.plan), distribution=one.distribution, version=one.version)
        for one in libraries
    )
    return tuple(sorted(rows, key=lambda row: (-row.unused_bytes, row.path)))


def _replay_line(usage: Usage) -> str | None:
    if usage.replay is None:
        return None
    when = time.strftime("%Y-%m-%d", time.gmtime(usage.replay.recorded_ns / 1e9))
    return (
        f"No GPU: replaying the trace recorded on {usage.replay.device}, {when}; "
        "nothing is proved here."
    )


def load_contents(run: Run) -> ReportContents:
    """Contents of a run's reports. Rows are of the plans, which healing may have changed.

    Raises:
        StoreError: the run isn't located yet, has no trace of GPU code, or one of its files can't
            be read.
    """
    run.require_gpu_trace()
    report = load_report(run)
    verdict = load_verdict(run)
    report = replace(
        report,
        directory=path_for_people(run.folder),
        proof=proof_row(verdict) if verdict is not None and verdict.gpu_libraries else None,
    )
    if (usage := load_usage(run)) is None:
        raise StoreError(f"{run.usage_file}: not found; make it with {run.locate_command}")
    if (reason := run.incomplete_reason) is not None:
        text = f"this run's plans may lack code that was used after the report: {reason}"
        return ReportContents(replace(report, warnings=(*report.warnings, text)), (), usage)
    if not run.plan_files():
        return ReportContents(report, (), usage)
    covered = {one.path: one for one in report.coverage}
    owners = {row.path: (row.distribution, row.version) for row in report.libraries}
    planned = []
    for one in load_planned(run):
        path = one.plan.library.path
        distribution, version = owners.get(path, (None, None))
        planned.append(
            dataclasses.replace(
                one, coverage=covered.get(path), distribution=distribution, version=version
            )
        )
    report = replace(report, libraries=rows_of(planned))
    return ReportContents(report, tuple(planned), usage)


def with_limits(contents: ReportContents, settings: Settings) -> ReportContents:
    """The same, with the limits of these settings in the place of those that the run was made with.

    Without any limit, the crossed limits stay as the run has them. Without a plan, the run crosses
    each limit, for nothing can be compared with it.
    """
    if not settings.has_limits:
        return contents
    if contents.report.libraries and not contents.libraries:
        crossed = (
            *contents.report.crossed,
            "the limits can't be checked: this run has no plan",
        )
        return dataclasses.replace(contents, report=replace(contents.report, crossed=crossed))
    owners = Owners()
    libraries = []
    for one in contents.libraries:
        if one.distribution is None:
            one = dataclasses.replace(
                one, distribution=owners.of(one.plan.library.path).distribution
            )
        limit = limit_of(
            settings.coverage.fail_under.libraries, names_of(one.plan.library, one.distribution)
        )
        covered = None if one.coverage is None else replace(one.coverage, limit=limit)
        if limit is not None and covered is None:
            raise StoreError(
                f"coverage.fail_under: the run has no coverage of "
                f"{one.plan.library.path}; plan it again with negativa locate"
            )
        libraries.append(dataclasses.replace(one, coverage=covered))
    report = _compared(contents.report, settings, contents.usage, libraries)
    return dataclasses.replace(contents, report=report)


def crossed_limits(run: Run, settings: Settings) -> tuple[str, ...]:
    """The limits of the settings that a planned run crosses, a sentence each.

    Raises:
        StoreError: the run can't be read.
    """
    return with_limits(load_contents(run), settings).report.crossed if settings.has_limits else ()


def report_verified(run: Run, settings: Settings) -> None:
    """Make the reports of a run that was verified, with the verdict.

    A report goes to the screen only if a flag asks for it. A session that traced the run has
    printed it before.

    Raises:
        StoreError: the run can't be read, or a report can't be written.
    """
    options = settings.reports
    is_asked = settings.sources["reports.formats"].startswith("--")
    prints = is_asked and not settings.enabled
    if not run.report_file.exists() or not (prints or any(w.path for w in options.formats)):
        return
    contents = with_limits(load_contents(run), settings)
    write_reports(contents, options, run)
    if prints:
        for paragraph in render_to_screen(contents, options):
            sys.stdout.write(f"{paragraph}\n\n")
        sys.stdout.flush()
