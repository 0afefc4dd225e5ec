"""The formats of a run's report, each with its renderer.

A new format is a renderer here, a ``ReportFormat``, and its name in the option ``reports.formats``
(``settings.options``). A format that is a file has a default name in ``settings.resolve``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from pytest_negativa.models.analysis import ReportContents
from pytest_negativa.models.settings import ReportFormat, Reports
from pytest_negativa.reporting.markdown import render_markdown
from pytest_negativa.reporting.terminal import render_report


def _terminal(contents: ReportContents, options: Reports) -> Iterator[str]:
    return render_report(contents.report, options)


def _json(contents: ReportContents, _options: Reports) -> bytes:
    return msgspec.json.format(msgspec.json.encode(contents.report), indent=1)


def _markdown(contents: ReportContents, _options: Reports) -> bytes:
    return render_markdown(contents.report).encode()


_TO_SCREEN: Mapping[ReportFormat, Callable[[ReportContents, Reports], Iterator[str]]] = {
    ReportFormat.TERMINAL: _terminal,
}
_TO_FILE: Mapping[ReportFormat, Callable[[ReportContents, Reports], bytes]] = {
    ReportFormat.JSON: _json,
    ReportFormat.MARKDOWN: _markdown,
}


def render_to_screen(contents: ReportContents, options: Reports) -> Iterator[str]:
    """The paragraphs of all wanted reports that go to the screen."""
    for wanted in options.formats:
        if wanted.format in _TO_SCREEN:
            yield from _TO_SCREEN[wanted.format](contents, options)


def render_to_files(contents: ReportContents, options: Reports) -> Iterator[tuple[Path, bytes]]:
    """Path and content of all wanted reports that are files."""
    for wanted in options.formats:
        if wanted.path is not None:
            yield Path(wanted.path), _TO_FILE[wanted.format](contents, options)
