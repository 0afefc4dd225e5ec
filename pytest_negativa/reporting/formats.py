"""Formats of a run's report: the renderer of each, the screen or a file (``settings.options``).

A new format is a renderer here, a ``ReportFormat``, and its name in the option ``reports.formats``
(``settings.options``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pytest_negativa.models.analysis import ReportContents
from pytest_negativa.models.settings import ReportFormat, Reports
from pytest_negativa.planning.difference import make_baseline
from pytest_negativa.reporting.coverage import render_missing
from pytest_negativa.reporting.coverage_files import (
    SourceFile,
    group_by_file,
    render_cobertura,
    render_lcov,
)
from pytest_negativa.reporting.github import render_annotations
from pytest_negativa.reporting.html.render import render_html
from pytest_negativa.reporting.markdown import render_markdown
from pytest_negativa.reporting.terminal import render_nothing, render_report
from pytest_negativa.reporting.text import (
    fit,
    path_for_people,
    printable,
    terminal_width,
    wrap,
)
from pytest_negativa.storage.urls import Url, place_of
from pytest_negativa.storage.user_files import STDOUT

ReportFile = tuple[Path | Url, bytes]
"""Path, absolute or ``-``, or URL of a file, and its content."""


def _terminal(contents: ReportContents, options: Reports) -> Iterator[str]:
    if (line := render_nothing(contents.report)) is not None:
        yield fit(line)
    else:
        yield from render_report(contents.report, options, terminal_width())


def _github(contents: ReportContents, _options: Reports) -> Iterator[str]:
    yield "\n".join(render_annotations(contents.report))


def _json(record: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


_TO_SCREEN: Mapping[ReportFormat, Callable[[ReportContents, Reports], Iterator[str]]] = {
    ReportFormat.TERMINAL: _terminal,
    ReportFormat.TERMINAL_MISSING: lambda contents, options: render_missing(
        contents.report.coverage, options, terminal_width()
    ),
    ReportFormat.GITHUB: _github,
}
_TO_FILE: Mapping[ReportFormat, Callable[[ReportContents], bytes]] = {
    ReportFormat.JSON: lambda contents: _json(contents.report),
    ReportFormat.MARKDOWN: lambda contents: render_markdown(contents.report).encode(),
    ReportFormat.HTML: render_html,
    ReportFormat.BASELINE: lambda contents: _json(make_baseline(contents.report)),
}
_OF_COVERAGE: Mapping[ReportFormat, Callable[[Sequence[SourceFile]], bytes]] = {
    ReportFormat.LCOV: lambda files: render_lcov(files).encode(),
    ReportFormat.COBERTURA: lambda files: render_cobertura(files, time.time_ns() // 1_000_000),
}


def render_to_screen(contents: ReportContents, options: Reports) -> Iterator[str]:
    """The paragraphs of all wanted reports that go to the screen, and where the others are."""
    for wanted in options.formats:
        if wanted.format in _TO_SCREEN:
            yield from _TO_SCREEN[wanted.format](contents, options)
    if render_nothing(contents.report) is None:
        yield from _written(options)


def _written(options: Reports) -> Iterator[str]:
    files = [place_of(wanted.path) for wanted in options.formats if wanted.path is not None]
    # A report on standard output may go to a program, which would read this line, too.
    on_devices = any(str(path) == STDOUT or str(path).startswith("/dev/") for path in files)
    if files and not on_devices:
        names = dict.fromkeys(
            printable(str(path) if isinstance(path, Url) else path_for_people(path))
            for path in files
        )
        yield wrap(f"Reports: {', '.join(names)}", terminal_width(), "  ")


def render_to_files(contents: ReportContents, options: Reports) -> Iterator[ReportFile]:
    """The files of all wanted reports that are files."""
    for wanted in options.formats:
        if wanted.path is None:
            continue
        if wanted.format in _TO_FILE:
            yield place_of(wanted.path), _TO_FILE[wanted.format](contents)
            continue
        files = group_by_file(contents.report.coverage, Path(contents.report.directory).absolute())
        for file in files:
            if file.index_file is not None:
                yield file.index_file, file.index_text.encode()
        yield place_of(wanted.path), _OF_COVERAGE[wanted.format](files)
