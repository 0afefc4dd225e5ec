"""Hooks that this plugin calls: what a conftest.py or another plugin can implement.

They are registered with pytest's own hooks, so an implementation is a function of that name,
and takes only those arguments that it needs. They are called in the process that reports
(with pytest-xdist: the controller), except for the detector's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import pytest

    from pytest_negativa.models.library import Element, Frame, LibraryMap
    from pytest_negativa.models.report import RunReport
    from pytest_negativa.models.settings import Settings
    from pytest_negativa.models.trace import Header, Usage
    from pytest_negativa.tracing.detector import Detector

hookspec = pluggy.HookspecMarker("pytest")


@hookspec(firstresult=True)
def pytest_negativa_register_detector(
    settings: Settings, path: Path, header: Header
) -> Detector | None:
    """Trace with a detector of your own instead of CUPTI; the first one given is taken.

    Called in every process that runs tests, before conftest.py files are imported, so that
    it sees what they import: implement it in an installed plugin or one given with ``-p``.

    :param settings: all options as they are in force.
    :param path: the trace file to write.
    :param header: its first line; replace ``detector`` by the name of yours.
    :return: a detector that was not started, or None to leave it to others.
    """


@hookspec
def pytest_negativa_libraries(
    config: pytest.Config, settings: Settings, usage: Usage
) -> Iterable[str] | None:
    """Add libraries that no traced process had loaded, so that they are reported too.

    :param config: pytest's configuration.
    :param settings: all options as they are in force; ``libraries`` selects from yours too.
    :param usage: what was traced.
    :return: paths of libraries.
    """


@hookspec(firstresult=True)
def pytest_negativa_keep_element(
    settings: Settings, library: LibraryMap, element: Element | Frame
) -> str | None:
    """Veto: keep an element that would be planned as unused, as a whole or in part.

    Called only for elements that nothing else keeps and, at granularity ``kernel``, for those
    that would lose some of their kernels. There is no opposite: what a test uses can't be given
    up.

    :param settings: all options as they are in force.
    :param library: the map of the library; ``library.kernels_of(element.content)`` are the
        kernels, as far as they could be read.
    :param element: an entry of a region, or a bare frame.
    :return: why it must be kept, as the report will say it, or None.
    """


@hookspec
def pytest_negativa_report(
    config: pytest.Config, settings: Settings, report: RunReport
) -> str | None:
    """Add a report: return lines for the terminal, or write a file.

    :param config: pytest's configuration.
    :param settings: all options as they are in force.
    :param report: the rows that all reports are made from.
    :return: lines for the terminal, shown below the tables, or None.
    """
